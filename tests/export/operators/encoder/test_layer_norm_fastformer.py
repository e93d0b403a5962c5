"""The collapsed Fastformer layer equals the layer as written, in float64."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from aftexport.nn.fastformer import Fastformer
from aftexport.operators.torch_ops.encoder import layer_norm_fastformer

Layer = tuple[nn.LayerNorm, Fastformer]


def layer(dim: int, heads: int, magnitude: float = 1.0) -> Layer:
    norm, attention = nn.LayerNorm(dim).double(), Fastformer(dim, heads).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 0.5)
    with torch.no_grad():
        attention.alpha_weight *= magnitude
        attention.beta_weight *= magnitude
    return norm, attention


@torch.no_grad()
def as_written(layer: Layer, x: Tensor, lengths: Tensor) -> Tensor:
    norm, attention = layer
    return x + attention(norm(x), lengths)


@torch.no_grad()
def collapsed(layer: Layer, x: Tensor, lengths: Tensor) -> Tensor:
    norm, attention = layer
    scale = 1 / math.sqrt(x.shape[2] // attention.num_heads)
    query, key, output = (
        part.weight.T for part in (attention.query, attention.key, attention.output)
    )
    return layer_norm_fastformer(
        x,
        norm.weight,
        norm.bias,
        query,
        attention.query.bias,
        key,
        attention.key.bias,
        query @ attention.alpha_weight * scale,
        attention.beta_weight * scale,
        output,
        attention.output.bias,
        lengths,
        epsilon=norm.eps,
        num_heads=attention.num_heads,
    )


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))


@settings(deadline=None)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 40),
    heads=st.sampled_from([1, 2, 4]),
    width=st.integers(1, 9),
    magnitude=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
@example(batch=2, tokens=40, heads=4, width=9, magnitude=30.0, seed=0)
def test_equals_the_layer_as_written(
    batch: int, tokens: int, heads: int, width: int, magnitude: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tested = layer(heads * width, heads, magnitude)
    x = torch.randn(batch, tokens, heads * width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, tokens + 1, (batch,), generator=generator)
    lengths[0] = tokens
    # The rows of an empty document are all padding, and the two forms pad differently.
    found, expected = (f(tested, x, lengths)[lengths > 0] for f in (collapsed, as_written))
    # A logit of magnitude 1000 carries 1e-13 of rounding into its exponential.
    assert error(found, expected) < 1e-11


def test_ordinary_numbers_agree_to_last_digits() -> None:
    torch.manual_seed(0)
    tested = layer(64, 8)
    x, lengths = torch.randn(3, 100, 64, dtype=torch.float64), torch.tensor([100, 1, 37])
    assert error(collapsed(tested, x, lengths), as_written(tested, x, lengths)) < 1e-12


@pytest.mark.parametrize("length", [0, 1, 5])
def test_padding_content_does_not_matter(length: int) -> None:
    torch.manual_seed(0)
    tested = layer(12, 3)
    x, lengths = torch.randn(1, 9, 12, dtype=torch.float64), torch.tensor([length])
    padded = x.clone()
    padded[:, length:] = 1e6 * torch.randn(9 - length, 12, dtype=torch.float64)
    before, after = (collapsed(tested, values, lengths) for values in (x, padded))
    assert torch.equal(after[:, :length], before[:, :length])
    assert after.isfinite().all()
