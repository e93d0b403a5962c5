"""Shared helpers of the layer tests."""

import torch
from torch import Tensor, nn

from aftexport.nn import (
    LAYERS,
    AftConv,
    AftFull,
    AftLocal,
    AftSimple,
    DeltaNet,
    DotProductAttention,
    EfficientAttention,
    Fastformer,
    GatedDeltaNet,
    GatedLinearAttention,
    LightningAttention,
    LinearAttention,
    Mamba2,
    Retention,
)

DIM, HEADS, MAX_LENGTH = 12, 3, 20

MAKERS = {
    "aft_full": lambda **options: AftFull(DIM, MAX_LENGTH, bias_rank=5, **options),
    "aft_full tanh": lambda **options: AftFull(DIM, MAX_LENGTH, gate="tanh", **options),
    "aft_local relative": lambda **options: AftLocal(DIM, 4, **options),
    "aft_local factors": lambda **options: AftLocal(DIM, 4, MAX_LENGTH, bias_rank=5, **options),
    "aft_simple": lambda **options: AftSimple(DIM, **options),
    "aft_simple no gate": lambda **options: AftSimple(DIM, gate="none", **options),
    "aft_conv": lambda **options: AftConv(DIM, HEADS, 5, **options),
    "efficient_attention": lambda **options: EfficientAttention(DIM, HEADS, **options),
    "efficient_attention scaling": lambda **options: EfficientAttention(
        DIM, HEADS, normalization="scaling", scale=0.5, **options
    ),
    "fastformer": lambda **options: Fastformer(DIM, HEADS, **options),
    "linear_attention": lambda **options: LinearAttention(DIM, HEADS, **options),
    "linear_attention relu": lambda **options: LinearAttention(
        DIM, HEADS, feature_map="relu", **options
    ),
    "gated_linear_attention": lambda **options: GatedLinearAttention(DIM, HEADS, **options),
    "retention": lambda **options: Retention(DIM, HEADS, **options),
    "lightning_attention": lambda **options: LightningAttention(DIM, HEADS, **options),
    "delta_net": lambda **options: DeltaNet(DIM, HEADS, **options),
    "gated_delta_net": lambda **options: GatedDeltaNet(DIM, HEADS, **options),
    "mamba2": lambda **options: Mamba2(DIM, HEADS, state_size=5, **options),
    "dot_product_attention": lambda **options: DotProductAttention(DIM, HEADS, **options),
}
assert {name.split()[0] for name in MAKERS} == set(LAYERS)


def make_layer(name: str, *, causal: bool = False) -> nn.Module:
    """Return a float64 layer as after training: no parameter has its special start."""
    torch.manual_seed(0)
    layer = MAKERS[name](causal=causal).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


def documents(*lengths: int) -> tuple[Tensor, Tensor]:
    """Return tokens ``[B, T, DIM]``, padded with noise, and the lengths."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(lengths), max(lengths), DIM, generator=generator, dtype=torch.float64)
    return x, torch.tensor(lengths)
