"""Decomposed mechanisms in every style are found and compute the same."""

from typing import Any

import onnx
import pytest
import torch

from aftexport.recognition.projections import TRANSPOSES_COST

from . import implementations
from .graphs import BATCH, TOKENS, assert_equal, exported, fused, operators, scripted
from .implementations import feature_products, images
from .implementations.aft import SeparableImages
from .implementations.efficient_attention import EfficientImages
from .implementations.linear_attention import LiteImages
from .layer import DIM, HEADS, example

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:Constant folding",
    "ignore:Using padding='same'",
)

LAYERS = implementations.layers()
PRODUCTS = {function.__name__ for function in feature_products.products()}


def operator_of(name: str) -> str:
    """Return the operator by which the tables of styles are sampled."""
    return LAYERS[name][0]


@pytest.mark.table(keep=0.12, by=operator_of)
@pytest.mark.parametrize("name", LAYERS)
def test_every_style_fuses_with_equal_output(name: str) -> None:
    operator, layer = LAYERS[name]
    found, model = fused(scripted(layer, example()))
    assert operators(found) == [operator], found.near_misses
    assert found.near_misses == []
    (match,) = found.matches
    is_product = name in PRODUCTS or "nodes after the operator divide" in match.note  # a small eps
    assert (match.attributes.get("normalizer") == "none") == is_product
    assert_equal(layer, model, example(), example(1, 1), example(31, 3))


@pytest.mark.table(keep=0.12, by=lambda name: operator_of(name).removeprefix("Causal"))
@pytest.mark.parametrize("name", list(LAYERS)[::4])
def test_graphs_of_both_exporters_fuse(name: str) -> None:
    operator, layer = LAYERS[name]
    found, model = fused(exported(layer, example()))
    assert operators(found) == [operator], found.near_misses
    assert_equal(layer, model, example(), example(1, 1), example(31, 3))


@pytest.mark.table(keep=0.12, by=operator_of)
@pytest.mark.parametrize("name", LAYERS)
def test_fixed_size_graphs_fuse(name: str) -> None:
    operator, layer = LAYERS[name]
    found, model = fused(scripted(layer, example(), axes=()))
    assert operators(found) == [operator], found.near_misses
    assert_equal(layer, model, example())


@pytest.mark.parametrize("name", ["rotary_above_einsum", "rotary_above_matmul"])
def test_rotation_of_fixed_size_keeps_product(name: str) -> None:
    """A fixed number of tokens makes the angles constants."""
    _, layer = LAYERS[name]
    found, model = fused(scripted(layer, example(), axes=()))
    assert operators(found) == ["NormalizedLinearAttention"]
    assert found.matches[0].attributes["normalizer"] == "none"
    assert "different weights" in found.matches[0].note
    assert_equal(layer, model, example())


@pytest.mark.parametrize(("most", "constant"), [(10, False), (250**2, True)])
def test_factors_of_longer_bias_stay_factors(
    most: int, constant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aftexport.recognition.patterns.evaluation._MAX_BIAS_ENTRIES", most)
    _, layer = LAYERS["full_factorized_by_length_long"]
    found, model = fused(scripted(layer, example()))
    assert operators(found) == ["AftFull"], found.near_misses
    assert any(list(tensor.dims) == [250, 250] for tensor in model.graph.initializer) == constant
    assert_equal(layer, model, example(), example(1, 1), example(31, 3), example(60, 1))


def test_bias_without_end_gets_none() -> None:
    _, layer = LAYERS["full_relative"]
    _, model = fused(scripted(layer, example()))
    assert_equal(layer, model, example(60, 1))


@pytest.mark.parametrize("axes", [(BATCH,), ()], ids=["any batch", "one batch"])
def test_image_efficient_attention_has_heads(axes: Any) -> None:
    module = EfficientImages()
    x = torch.randn(2, DIM, 5, 6)
    found, model = fused(scripted(module, x, axes=axes))
    assert operators(found) == ["EfficientAttention"] * HEADS, found.near_misses
    assert_equal(module, model, x)


@pytest.mark.parametrize("axes", [(BATCH,), ()], ids=["any batch", "one batch"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_image_linear_attention_with_ones_column(channels_last: bool, axes: Any) -> None:
    module = LiteImages(channels_last=channels_last)
    x = torch.randn(2, DIM, 5, 6, generator=torch.Generator().manual_seed(0))
    found, model = fused(scripted(module, x, axes=axes))
    if channels_last:
        assert operators(found) == ["NormalizedLinearAttention"], found.near_misses
        assert found.matches[0].attributes["eps"] == pytest.approx(1e-5, rel=1e-6, abs=0.0)
    else:  # a convolution of other pixels is before the heads
        assert operators(found) == []
        assert [miss.reason for miss in found.near_misses] == [TRANSPOSES_COST]
    assert_equal(module, model, x)


@pytest.mark.table(keep=0.4)
@pytest.mark.parametrize("name", images.layers())
def test_diffusion_attention_of_images(name: str) -> None:
    operator, module = images.layers()[name]
    x = torch.randn(2, 8, 4, 6, generator=torch.Generator().manual_seed(0))
    found, model = fused(scripted(module, x, axes={0: "b", 2: "h", 3: "w"}))
    assert operators(found) == ([] if name in images.COSTLY else [operator]), found.near_misses
    assert_equal(module, model, x, x[:1, :, :3, 1:])


@pytest.mark.parametrize("axes", [{0: "b", 3: "n"}, {0: "b"}, {}], ids=["any", "batch", "none"])
def test_separable_attention_of_patches(axes: dict[int, str]) -> None:
    """Where all sizes are fixed, the convolution below tells the channels."""
    module = SeparableImages()
    x = torch.randn(2, 8, 4, 6, generator=torch.Generator().manual_seed(0))
    found, model = fused(scripted(module, x, axes=axes))
    assert operators(found) == ["AftSimple"], found.near_misses
    others = [x[:1]] if 0 in axes else []
    assert_equal(module, model, x, *others, *([x[:1, :, :, :5]] if 3 in axes else []))


def test_separable_attention_over_channels_stays() -> None:
    module = SeparableImages(axis=1)
    found, _ = fused(scripted(module, torch.randn(2, 8, 4, 6), axes={}))
    assert operators(found) == []


@pytest.mark.parametrize("filling", ["infinity", "lowest", "low"])
@pytest.mark.parametrize("axes", [(BATCH, TOKENS), ()], ids=["any size", "one size"])
def test_fastformer_without_counting_tokens(filling: str, axes: Any) -> None:
    """Documents with no token that counts, with one, with all, and with all but one."""
    _, layer = LAYERS[f"fastformer_filled_twice_{filling}"]
    x = torch.randn(4, 12, DIM, generator=torch.Generator().manual_seed(0))
    x[..., 0] = torch.tensor([-2.0, -2.0, 0.0, 0.0])[:, None]
    x[1::2, 5, 0] = torch.tensor([0.0, -2.0])
    found, model = fused(scripted(layer, x, axes=axes))
    assert operators(found) == ["Fastformer"], found.near_misses
    assert_equal(layer, model, x)


def test_half_precision_is_read_through_casts() -> None:
    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = x.float().softmax(1).half()
            return torch.sigmoid(x) * (weight * x).sum(1, keepdim=True)

    found, _ = fused(scripted(Half(), example().half()))
    assert operators(found) == ["AftSimple"]


@pytest.mark.parametrize(("ir_version", "expected"), [(3, ["AftFull"]), (8, [])])
def test_weights_may_also_be_inputs(ir_version: int, expected: list[str]) -> None:
    """Before version 4 of the format all weights are inputs; since then only changeable ones."""
    _, layer = LAYERS["full_matmul"]
    model = scripted(layer, example())
    for weight in model.graph.initializer:
        model.graph.input.append(
            onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        )
    model.ir_version = ir_version
    found, changed = fused(model)
    assert operators(found) == expected
    assert ("may be any numbers" in found.unexamined) == (not expected)
    if expected:
        assert_equal(layer, changed, example())
