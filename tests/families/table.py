"""One tiny model of each family of the transformers library, with random weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 300
_NAMES = {0: "letter", 1: "invoice", 2: "contract"}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    **_IDS,
}
_DECODER = {**_SIZES, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 8192}
_EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
_HYBRID_LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
_ROBERTA = {"max_position_embeddings": 1026, "pad_token_id": 1, "bos_token_id": 0}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "feed_forward_proj": "gated-gelu",
}
_SEQUENCES = "ForSequenceClassification"


@dataclass(frozen=True)
class Family:
    """A family of models, and the class and configuration of its tiny one."""

    title: str
    stem: str  # the start of the names of its classes
    settings: dict[str, Any]
    head: str = _SEQUENCES  # the end of the name of the class
    config: str = ""  # the class of the configuration, if it does not have the stem's name

    @property
    def class_name(self) -> str:
        return f"{self.stem}{self.head}"

    def build(self) -> Any:
        """Return the model with fixed random weights."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config or f"{self.stem}Config")(
            **self.settings, id2label=_NAMES, label2id={n: i for i, n in _NAMES.items()}
        )
        model = getattr(transformers, self.class_name)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # The library begins biases, sinks and tables with zeros or ones.
                parameter += 0.05 * torch.randn_like(parameter)
        return model

    def save(self, folder: Path) -> None:
        """Write the model, as ``save_pretrained`` does."""
        self.build().save_pretrained(folder)


FAMILIES = (
    Family("BERT", "Bert", _SIZES),
    Family("RoBERTa", "Roberta", _SIZES | _ROBERTA),
    Family("XLM-RoBERTa", "XLMRoberta", _SIZES | _ROBERTA),
    Family(
        "DistilBERT",
        "DistilBert",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 64,
            "max_position_embeddings": 1024,
            "pad_token_id": 0,
        },
    ),
    Family("ELECTRA", "Electra", _SIZES | {"embedding_size": 16}),
    Family("ALBERT", "Albert", _SIZES | {"embedding_size": 16}),
    Family("MPNet", "MPNet", _SIZES | _ROBERTA),
    Family(
        "ModernBERT",
        "ModernBert",
        _DECODER
        | {"num_hidden_layers": 4, "local_attention": 128, "cls_token_id": 1, "sep_token_id": 2},
    ),
    Family("EuroBERT", "EuroBert", _DECODER | {"num_key_value_heads": 2}),
    Family("NomicBERT", "NomicBert", _DECODER | {"num_key_value_heads": 2}),
    Family(
        "Jina Embeddings v3",
        "JinaEmbeddingsV3",
        _SIZES | {"max_position_embeddings": 8194, "pad_token_id": 1},
    ),
    Family(
        "ESM",
        "Esm",
        _SIZES
        | {
            "position_embedding_type": "rotary",
            "mask_token_id": 4,
            "token_dropout": True,
            "emb_layer_norm_before": False,
        },
    ),
    Family(
        "DeBERTa-v2",
        "DebertaV2",
        _SIZES
        | {
            "relative_attention": True,
            "position_buckets": 256,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
    ),
    Family(
        "Longformer",
        "Longformer",
        _SIZES | _ROBERTA | {"max_position_embeddings": 4098, "attention_window": [64, 64]},
    ),
    Family(
        "BigBird",
        "BigBird",
        _SIZES | {"max_position_embeddings": 4096, "sep_token_id": 4, "block_size": 64},
    ),
    Family("T5", "T5", _T5),
    Family("T5 encoder", "T5", _T5, head="EncoderModel"),
    Family("T5 for tokens", "T5", _T5, head="ForTokenClassification"),
    Family(
        "GPT-2",
        "GPT2",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 1024,
            **_IDS,
        },
    ),
    Family("Llama", "Llama", _DECODER),
    Family("Mistral", "Mistral", _DECODER | {"sliding_window": 128}),
    Family("Qwen2", "Qwen2", _DECODER),
    Family("Qwen3", "Qwen3", _DECODER),
    Family("Qwen3 with experts", "Qwen3Moe", _DECODER | _EXPERTS),
    Family("Mixtral", "Mixtral", _DECODER | _EXPERTS),
    Family("Qwen3.5", "Qwen3_5Text", _DECODER | _DELTA | _HYBRID_LAYERS),
    Family(
        "Qwen3-Next",
        "Qwen3Next",
        _DECODER | _DELTA | _HYBRID_LAYERS | _EXPERTS | {"shared_expert_intermediate_size": 16},
    ),
    Family("LFM2", "Lfm2", _DECODER | {"layer_types": ["conv", "full_attention"]}, head="Model"),
    Family(
        "EmbeddingGemma",
        "Gemma3Text",
        _DECODER
        | {
            "num_hidden_layers": 4,
            "use_bidirectional_attention": True,
            "sliding_window": 128,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
        head="Model",
    ),
    Family(
        "Gemma 3",
        "Gemma3Text",
        _DECODER
        | {
            "num_hidden_layers": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Family(
        "Privacy Filter",
        "OpenAIPrivacyFilter",
        _DECODER | _EXPERTS | {"sliding_window": 128},
        head="ForTokenClassification",
    ),
    Family("GPT-OSS", "GptOss", _DECODER | _EXPERTS | {"sliding_window": 128}),
    Family(
        "MiniMax",
        "MiniMax",
        _DECODER
        | _EXPERTS
        | {"layer_types": ["linear_attention", "full_attention"], "block_size": 64},
    ),
    Family(
        "Falcon-H1",
        "FalconH1",
        _DECODER
        | {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "mamba_n_groups": 1,
        },
        head="Model",
    ),
    Family(
        "Mamba-2",
        "Mamba2",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            **_IDS,
        },
        head="Model",
    ),
    Family(
        "Mamba",
        "Mamba",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            **_IDS,
        },
        head="Model",
    ),
    Family(
        "RWKV",
        "Rwkv",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "context_length": 1024,
            **_IDS,
        },
        head="Model",
    ),
)
BY_TITLE = {family.title: family for family in FAMILIES}
