"""Tiny models of transformers with recurrent layers, with random weights."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BailingHybridConfig,
    BailingHybridModel,
    KimiLinearConfig,
    KimiLinearModel,
    Mamba2Config,
    Mamba2Model,
    Qwen3_5TextConfig,
    Qwen3_5TextForSequenceClassification,
    Qwen3NextConfig,
)

from aftexport.checkpoint.transformers_class import TransformersModel

VOCABULARY = 300
_HYBRID: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "pad_token_id": 0,
    "initializer_range": 0.4,
    "num_labels": 3,
}


_DELTA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A hybrid whose recurrence has a decay for each channel, without experts."""


class _Classifier(nn.Module):
    """A classifier around a model of transformers, with its cache as the library sets it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        vectors = self.body(input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(vectors.dtype)
        return self.head((vectors * weights).sum(1) / weights.sum(1))


class Mamba2Classifier(_Classifier):
    """A classifier around ``Mamba2Model``."""

    def __init__(self) -> None:
        config = Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            state_size=8,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=8,
            n_groups=2,
            chunk_size=16,
        )
        super().__init__(Mamba2Model(config))


def qwen3_5_config(**settings: Any) -> Any:
    return Qwen3_5TextConfig(**_HYBRID | settings)


def qwen3_5() -> nn.Module:
    return TransformersModel(Qwen3_5TextForSequenceClassification(qwen3_5_config()), "logits")


def qwen3_next_config(**settings: Any) -> Any:
    """Return the configuration of a hybrid without experts."""
    return Qwen3NextConfig(**_HYBRID | {"num_experts": 0, "mlp_only_layers": [0, 1]} | settings)


def _with_random_decays(body: nn.Module) -> nn.Module:
    """Return a model whose decays, which the library leaves empty, are random too."""
    for parameter in body.parameters():
        nn.init.normal_(parameter, std=0.4)
    return _Classifier(body)


def kimi_linear() -> nn.Module:
    config = KimiLinearConfig(**_DELTA, linear_head_dim=8, linear_num_heads=2)
    return _with_random_decays(KimiLinearModel(config))


def bailing_hybrid() -> nn.Module:
    return _with_random_decays(BailingHybridModel(BailingHybridConfig(**_DELTA, head_dim=8)))


BUILDERS = {
    "qwen3_5": qwen3_5,
    "mamba2": Mamba2Classifier,
    "kimi_linear": kimi_linear,
    "bailing_hybrid": bailing_hybrid,
}


def build(name: str) -> nn.Module:
    """Return a model with fixed random weights."""
    torch.manual_seed(0)
    return BUILDERS[name]().eval()


def mamba2_classifier() -> nn.Module:
    """Return the model for ``--factory``."""
    return build("mamba2")
