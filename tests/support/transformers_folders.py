"""Tiny models of transformers with random weights, as ``save_pretrained`` writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

LABELS = ("person", "place", "thing")
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
MAX_TOKENS = 48
TEXTS = (
    "Ada met Grace in Istanbul, on Tuesday.",
    "A naïve café: cafe\u0301, Straße, \u0130stanbul!",
    "Thumbs up 👍🏽 and a family 👩\u200d👩\u200d👧.",
    "日本語 and 한국어, side by side",
    "3.14 isn't 22/7",
)
_SENTENCES = [text * 3 for text in TEXTS] + ["Grace and Ada code in a small café by the sea."] * 4
_VOCABULARY = 300
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.4,
}


def wordpiece() -> Tokenizer:
    """Return a tokenizer like BERT's: words in lower case, ``[CLS]`` and ``[SEP]`` around."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=_VOCABULARY, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def byte_level_bpe() -> Tokenizer:
    """Return a tokenizer like RoBERTa's: merges of bytes, ``<s>`` and ``</s>`` around."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    return tokenizer


def unigram() -> Tokenizer:
    """Return a tokenizer like XLM-RoBERTa's: pieces of likely text, ``<s>`` and ``</s>`` around."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


_SPECIAL = {
    "pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>",
    "bos_token": "<s>", "eos_token": "</s>",
}  # fmt: skip
_SPECIAL_OF_BERT = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}  # fmt: skip
_PADDED = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def bert(**settings: Any) -> Any:
    return transformers.BertConfig(**_SIZES | settings)


def roberta(**settings: Any) -> Any:
    positions = {"max_position_embeddings": MAX_TOKENS + 2}
    return transformers.RobertaConfig(**_SIZES | _PADDED | positions | settings)


def xlm_roberta(**settings: Any) -> Any:
    positions = {"max_position_embeddings": MAX_TOKENS + 2}
    return transformers.XLMRobertaConfig(**_SIZES | _PADDED | positions | settings)


def modernbert(**settings: Any) -> Any:
    ids = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2}
    own = {"eos_token_id": 3, "local_attention": 8, "global_attn_every_n_layers": 2}
    return transformers.ModernBertConfig(**_SIZES | ids | own | settings)


def t5(**settings: Any) -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return transformers.T5Config(vocab_size=_VOCABULARY, **sizes | settings)


def tiny(name: str) -> Any:
    """Return a small configuration of Albert, Bert, Funnel or Qwen2."""
    own: dict[str, Any] = {
        "Albert": {"embedding_size": 8},
        "Funnel": {"block_sizes": [1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32},
    }.get(name, {})
    sizes = {} if name == "Funnel" else _SIZES
    given = {"vocab_size": _VOCABULARY, "pad_token_id": 0, **sizes, **own}
    return getattr(transformers, f"{name}Config")(**given)


_TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], dict[str, str]]] = {
    "BertConfig": (wordpiece, _SPECIAL_OF_BERT),
    "ModernBertConfig": (wordpiece, _SPECIAL_OF_BERT),
    "RobertaConfig": (byte_level_bpe, _SPECIAL),
    "XLMRobertaConfig": (unigram, _SPECIAL),
    "T5Config": (unigram, _SPECIAL),
}


def named(labels: tuple[str, ...]) -> dict[str, Any]:
    """Return the entries of a configuration that name labels."""
    return {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}


def save(folder: Path, class_name: str, config: Any, **settings: Any) -> Any:
    """Write a model with random weights and its tokenizer; return the model."""
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config).eval()
    model.save_pretrained(folder, **settings)
    build, special = _TOKENIZERS.get(type(config).__name__, (wordpiece, _SPECIAL_OF_BERT))
    transformers.PreTrainedTokenizerFast(tokenizer_object=build(), **special).save_pretrained(
        folder
    )
    return model


class Logits(torch.nn.Module):
    """A model of transformers that returns only its logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids, attention_mask=attention_mask).logits
        return logits


LINEAR_CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class LinearConfig(PreTrainedConfig):
    model_type = "linear_text"

    def __init__(self, vocab_size=300, hidden_size=16, heads=2, **settings):
        self.vocab_size, self.hidden_size, self.heads = vocab_size, hidden_size, heads
        super().__init__(**settings)


class LinearForSequenceClassification(PreTrainedModel):
    config_class = LinearConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.parts = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size)
                                   for _ in range(3))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **options):
        x = self.embedding(input_ids)
        batch, tokens, size = x.shape
        heads = self.config.heads
        q, k, v = (part(x).view(batch, tokens, heads, size // heads).transpose(1, 2)
                   for part in self.parts)
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        mask = attention_mask[:, None, :, None].to(x.dtype)
        k = k * mask
        context = k.transpose(2, 3) @ v
        normalizer = q @ k.sum(2).unsqueeze(3) + 1e-6
        y = (q @ context / normalizer).transpose(1, 2).reshape(batch, tokens, size)
        y = (x + y) * attention_mask[:, :, None].to(x.dtype)
        pooled = y.sum(1) / attention_mask.sum(1, keepdim=True).to(x.dtype)
        return SequenceClassifierOutput(logits=self.classifier(pooled))
"""
"""Two classes, of which config.json names the second; importing them leaves a trace."""
LINEAR_AUTO_MAP = {
    "AutoConfig": "modeling_linear.LinearConfig",
    "AutoModelForSequenceClassification": "modeling_linear.LinearForSequenceClassification",
}
