"""Tiny models of transformers with recurrent layers, with random weights."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Mamba2Config,
    Mamba2Model,
    Qwen3_5TextConfig,
    Qwen3_5TextForSequenceClassification,
    Qwen3NextConfig,
)

from aftexport.checkpoint.transformers_module import TransformersModel

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


class Mamba2Classifier(nn.Module):
    """A classifier around ``Mamba2Model``, with its cache as the library sets it by default."""

    def __init__(self) -> None:
        super().__init__()
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
        self.body = Mamba2Model(config)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        vectors = self.body(input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(vectors.dtype)
        return self.head((vectors * weights).sum(1) / weights.sum(1))


def qwen3_5_config(**settings: Any) -> Any:
    return Qwen3_5TextConfig(**_HYBRID | settings)


def qwen3_5() -> nn.Module:
    return TransformersModel(Qwen3_5TextForSequenceClassification(qwen3_5_config()), "logits")


def qwen3_next_config(**settings: Any) -> Any:
    """Return the configuration of a hybrid without experts."""
    return Qwen3NextConfig(**_HYBRID | {"num_experts": 0, "mlp_only_layers": [0, 1]} | settings)


BUILDERS = {"qwen3_5": qwen3_5, "mamba2": Mamba2Classifier}


def build(name: str) -> nn.Module:
    """Return a model with fixed random weights."""
    torch.manual_seed(0)
    return BUILDERS[name]().eval()


def mamba2_classifier() -> nn.Module:
    """Return the model for ``--factory``."""
    return build("mamba2")
