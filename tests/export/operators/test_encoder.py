"""The encoder operators: portable bodies and kernels against the definition; Fastformer's layer."""

import math

import numpy as np
import onnx
import pytest
import torch
from encoder_forms import FORMS, Form
from hypothesis import example, given, settings
from hypothesis import strategies as st
from one_node import OneNode
from onnx_runtimes import RUNTIMES
from torch import Tensor, nn

from aftexport.nn.fastformer import Fastformer
from aftexport.operators.encoder import OPERATORS
from aftexport.operators.torch_ops import expected_outputs
from aftexport.operators.torch_ops.encoder import layer_norm_fastformer
from aftexport.parity import TOLERANCES

SIZES = [
    {"B": 1, "T": 1, "D": 4, "E": 3, "F": 5, "G": 1, "H": 2},
    {"B": 3, "T": 33, "D": 17, "E": 40, "F": 70, "G": 33, "H": 1},
    {"B": 1, "T": 500, "D": 64, "E": 192, "F": 128, "G": 64, "H": 8},
]


def inputs_of(tested: Form, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    inputs, operator = {}, OPERATORS[tested.op]
    for name, shape in zip(operator.inputs, operator.shapes, strict=True):
        size = [sizes[axis] for axis in shape.split()]
        if name == "lengths":
            inputs[name] = np.arange(size[0])[::-1] + sizes["T"] - size[0] + 1
        elif name not in tested.absent:
            spread = size[0] ** -0.5 if len(size) == 2 else 1.0
            inputs[name] = (generator.standard_normal(size) * spread).astype(np.float32)
    return inputs


@pytest.mark.parametrize("fused", [False, True], ids=["portable", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"T{s['T']}")
@pytest.mark.parametrize("tested", [*FORMS, Form("LayerNormFastformer")], ids=str)
def test_encoder_operator_equals_definition(
    tested: Form, sizes: dict[str, int], precision: str, fused: bool
) -> None:
    node, inputs, expected = node_of(tested, sizes, precision)
    onnx.checker.check_model(node.model(), full_check=True)
    for actual, exact in zip(node.run(inputs, kernel=fused), expected, strict=True):
        error = np.abs(actual - exact.numpy()).max() / max(1.0, exact.abs().max().item())
        assert error <= TOLERANCES[precision].bound


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_portable_body_runs_in_every_runtime(tested: Form, runtime: str) -> None:
    node, inputs, expected = node_of(tested, SIZES[1], "fp32")
    actual = RUNTIMES[runtime](node.model())(inputs)
    for name, exact in zip(OPERATORS[tested.op].outputs, expected, strict=True):
        error = np.abs(actual[name] - exact.numpy()).max() / max(1.0, exact.abs().max().item())
        assert error <= TOLERANCES["fp32"].bound


def node_of(
    tested: Form, sizes: dict[str, int], precision: str
) -> tuple[OneNode, dict[str, np.ndarray], tuple[Tensor, ...]]:
    """Return a node, its inputs, and its outputs by the definition in float64."""
    operator = OPERATORS[tested.op]
    inputs = inputs_of(tested, sizes)
    attributes = {a.name: a.default for a in operator.attributes} | tested.attributes
    if "num_heads" in attributes:
        attributes["num_heads"] = sizes["H"]
    tensors = [torch.from_numpy(inputs[n]) if n in inputs else None for n in operator.inputs]
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in tensors]
    expected = expected_outputs(operator, *wide, **attributes)
    node = OneNode.for_inputs(tested.op, attributes | {"precision": precision}, inputs)
    return node, inputs, expected


Layer = tuple[nn.LayerNorm, Fastformer]


def fastformer_layer(dim: int, heads: int, magnitude: float = 1.0) -> Layer:
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


def relative_error(actual: Tensor, expected: Tensor) -> float:
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
def test_collapsed_layer_equals_layer_as_written(
    batch: int, tokens: int, heads: int, width: int, magnitude: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tested = fastformer_layer(heads * width, heads, magnitude)
    x = torch.randn(batch, tokens, heads * width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, tokens + 1, (batch,), generator=generator)
    lengths[0] = tokens
    # The rows of an empty document are all padding, and the two forms pad differently.
    found, expected = (f(tested, x, lengths)[lengths > 0] for f in (collapsed, as_written))
    # A logit of magnitude 1000 carries 1e-13 of rounding into its exponential.
    assert relative_error(found, expected) < 1e-11


def test_collapsed_layer_agrees_to_last_digits() -> None:
    torch.manual_seed(0)
    tested = fastformer_layer(64, 8)
    x, lengths = torch.randn(3, 100, 64, dtype=torch.float64), torch.tensor([100, 1, 37])
    assert relative_error(collapsed(tested, x, lengths), as_written(tested, x, lengths)) < 1e-12


@pytest.mark.parametrize("length", [0, 1, 5])
def test_collapsed_layer_ignores_padding(length: int) -> None:
    torch.manual_seed(0)
    tested = fastformer_layer(12, 3)
    x, lengths = torch.randn(1, 9, 12, dtype=torch.float64), torch.tensor([length])
    padded = x.clone()
    padded[:, length:] = 1e6 * torch.randn(9 - length, 12, dtype=torch.float64)
    before, after = (collapsed(tested, values, lengths) for values in (x, padded))
    assert torch.equal(after[:, :length], before[:, :length])
    assert after.isfinite().all()
