"""Decomposed mechanisms in every style are found; look-alikes stay unchanged."""

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.operators.domain import opset_of
from aftexport.recognition.projections import TRANSPOSES_COST

from . import implementations, look_alikes, look_alikes_forms
from .graphs import BATCH, TOKENS, assert_equal, exported, fused, operators, scripted
from .implementations import feature_products, images
from .implementations.efficient_attention import EfficientImages
from .implementations.linear_attention import LiteImages
from .implementations.separable import SeparableImages
from .layer import DIM, HEADS

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:Constant folding",
    "ignore:Using padding='same'",
)

LAYERS = implementations.layers()
PRODUCTS = {function.__name__ for function in feature_products.products()}
OF_ANY_SIZE_ONLY = ["rotary_above_einsum", "rotary_above_matmul"]
LOOK_ALIKES = look_alikes.layers()
OF_LONG_DOCUMENTS = look_alikes.of_long_documents()


def example(tokens: int = 12, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(batch, tokens, DIM, generator=generator)


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
    assert (found.matches[0].attributes.get("normalizer") == "none") == (name in PRODUCTS)
    assert_equal(layer, model, example(), example(1, 1), example(31, 3))


@pytest.mark.table(keep=0.12, by=lambda name: operator_of(name).removeprefix("Causal"))
@pytest.mark.parametrize("name", list(LAYERS)[::4])
def test_graphs_of_both_exporters_fuse(name: str) -> None:
    operator, layer = LAYERS[name]
    found, model = fused(exported(layer, example()))
    assert operators(found) == [operator], found.near_misses
    assert_equal(layer, model, example(), example(1, 1), example(31, 3))


@pytest.mark.table(keep=0.12, by=operator_of)
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in OF_ANY_SIZE_ONLY])
def test_fixed_size_graphs_fuse(name: str) -> None:
    operator, layer = LAYERS[name]
    found, model = fused(scripted(layer, example(), axes=()))
    assert operators(found) == [operator], found.near_misses
    assert_equal(layer, model, example())


@pytest.mark.parametrize("name", OF_ANY_SIZE_ONLY)
def test_rotation_of_fixed_size_is_left_alone(name: str) -> None:
    """A fixed number of tokens makes the angles constants, and no product of features is read."""
    _, layer = LAYERS[name]
    found, model = fused(scripted(layer, example(), axes=()))
    assert operators(found) == []
    assert [miss.mechanism for miss in found.near_misses] == ["linear_attention"]
    assert_equal(layer, model, example())


@pytest.mark.parametrize(("most", "constant"), [(10, False), (250**2, True)])
def test_factors_of_longer_bias_stay_factors(
    most: int, constant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aftexport.recognition.patterns._constants._MAX_BIAS_ENTRIES", most)
    _, layer = LAYERS["full_factorized_by_length_long"]
    found, model = fused(scripted(layer, example()))
    assert operators(found) == ["AftFull"], found.near_misses
    assert any(list(tensor.dims) == [250, 250] for tensor in model.graph.initializer) == constant
    assert_equal(layer, model, example(), example(1, 1), example(31, 3), example(60, 1))


def test_sum_over_excess_axes_is_ignored() -> None:
    """No mechanism sums over so many axes."""
    axes = ", ".join(["2"] * 8)
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]>
        g (float[b, t, {axes}] x, float[b, t, {axes}] y) => (float[b, t] z) {{
            e = Exp(x)
            p = Mul(e, y)
            z = Einsum <equation = "btcdefghij->bt"> (p)
        }}"""
    )
    found, _ = fused(model)
    assert found.matches == []


def test_bias_without_end_gets_none() -> None:
    _, layer = LAYERS["full_relative"]
    _, model = fused(scripted(layer, example()))
    assert_equal(layer, model, example(60, 1))


@pytest.mark.table(keep=0.2, by=lambda name, axes: name)
@pytest.mark.parametrize("axes", [(BATCH, TOKENS), ()], ids=["any size", "one size"])
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_left_alone(name: str, axes: Any) -> None:
    """The product of features and values in some is the operator's, and all else stays."""
    layer = LOOK_ALIKES[name]
    found, model = fused(scripted(layer, example(), axes=axes))
    assert not found.unexamined
    assert bool(operators(found)) == (name in look_alikes.PRODUCTS)
    if name not in look_alikes.PRODUCTS:
        assert bool(found.near_misses) != bool(found.absence), "one reason, and no other"
        return
    for match in found.matches:
        assert match.operator.removeprefix("Causal") == "NormalizedLinearAttention"
        assert match.attributes["normalizer"] == "none"
        assert match.note
    assert layer(example()).isfinite().all() == (name != look_alikes.NOT_FINITE)
    if name != look_alikes.NOT_FINITE:
        assert_equal(layer, model, example())


@pytest.mark.parametrize("name", look_alikes_forms.of_longer_documents())
def test_effect_of_longer_documents_prevents_fusion(name: str) -> None:
    """The effect shows only in documents longer than were tried."""
    found, _ = fused(scripted(look_alikes_forms.of_longer_documents()[name], example()))
    assert operators(found) == []
    assert "documents longer than were tried" in found.near_misses[0].reason


@pytest.mark.parametrize("name", ["simple_greatest_value", "mean_of_tokens"])
def test_no_weighted_sum_is_said(name: str) -> None:
    found, _ = fused(scripted(LOOK_ALIKES[name], example()))
    assert (found.near_misses, found.absence) == ([], "there is no weighted sum over tokens")


@pytest.mark.parametrize("name", OF_LONG_DOCUMENTS)
def test_fusion_keeps_effect_of_long_documents(name: str) -> None:
    original = scripted(OF_LONG_DOCUMENTS[name], example())
    _, model = fused(original)
    x = {"x": example(76).numpy()}
    expected, output = (
        next(iter(OnnxRuntimeEngine(m.SerializeToString(), fused=False).run(x).values()))
        for m in (original, model)
    )
    np.testing.assert_allclose(output, expected, atol=1e-5)


@pytest.mark.table(keep=0.5, by=lambda name, reason: name.partition("_")[0])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("simple_all_over_channels", "over the channels"),
        ("simple_over_the_batch", "may be the batch"),
        ("simple_maximum_over_the_batch", "maximum"),
        ("simple_clamped_keys", "clamped"),
        ("linear_padded_with_a_half", "scaled"),
        ("linear_padded_in_front", "not known to be of a column of ones after the values"),
        ("linear_padded_as_the_last_key", "not known to be of a column of ones after the values"),
        ("linear_padded_column_before_taken", "of a column of ones after the values"),
        ("linear_padded_clamped", "goes through Clip"),
        ("linear_padded_two_columns_taken", "different weights"),
        ("ConvShifted", "its padding is another"),
        ("ConvEvenTapsShifted", "its padding is another"),
        ("ConvBackwards", "its padding is another"),
        ("ConvDilated", "dilated"),
        ("ConvStrided", "not a depthwise convolution of stride 1"),
        ("ConvAlone", "as in a plain convolution"),
        ("ConvFiltersDiffer", "different filters"),
        ("ConvFilterOfChannels", "differs among channels"),
        ("ConvWeightsOfEitherSign", "is 0 or less"),
        ("ConvWithEps", "1e-06 is added"),
        ("fastformer_pools_keys", "pooling is of other keys"),
        ("efficient_axes_swapped", "softmaxes are not over"),
        ("efficient_channels_left_out", "channels of the query"),
        ("full_clamped_bias", "go through Clip once the position bias is added"),
        ("full_keys_much_lower", "go through Where once the position bias is added"),
        ("full_mask_of_queries_and_keys", "more than two positions"),
        ("fastformer_weights_multiplied", "a tensor that is not a mask"),
        ("linear_opposite_mask_below", "different weights"),
        ("linear_of_keys_before", "mask is not known to be of the keys after"),
        ("linear_of_keys_up_to_the_next", "mask is not known to be of the keys after"),
        ("fastformer_filled_with_ten", "a linear layer of the pooled tensor"),
        ("linear_causal_above_alone", "sums over different keys"),
        ("simple_causal_above_alone", "sums over different keys"),
        ("linear_rows_masked_below_alone", "multiplied by a mask, and the numerator is not"),
        ("linear_scaled_below_alone", "the denominator is scaled"),
        ("simple_mean_of_values", "divided by the number of tokens"),
        ("simple_numbers_added", "added to the weighted sum before the division"),
        ("simple_not_normalized", "nothing divides the weighted sum"),
        ("simple_relu_weights", "neither exponentials of keys nor products of features"),
        ("simple_one_key_by_softplus", "neither sigmoid, tanh nor relu"),
        ("simple_rows_filled_with_one", "no gate multiplies"),
        ("pooling", "one row for all tokens"),
        ("pooling_of_one_key", "one row for all tokens"),
        ("dot_product", "of pairs of query and key"),
        ("dot_product_of_one_key", "of pairs of query and key"),
        ("positions_alone", "the weights are constants"),
        ("efficient_query_not_normalized", "the query is not normalized"),
        ("efficient_keys_not_normalized", "the keys are not normalized"),
        ("products_of_queries_below", "different weights"),
        ("products_clamped_above", "goes through Clip"),
        ("products_clamped_and_eps", "goes through Clip"),
        ("products_eps_of_keys", "added to the sum of the keys"),
        ("products_sines_swapped_below", "different weights"),
        ("simple_eps_after_the_maximum", "added to the denominator"),
        ("separable_over_the_batch", "may be the batch"),
        ("separable_leaky", "neither sigmoid, tanh nor relu"),
        ("cross_masked_below_alone", "different weights"),
        ("cross_dot_product", "of pairs of query and key"),
        ("ConvCircular", "padding other than zeros"),
        ("ConvPaddedByOnes", "padding other than zeros"),
        ("ConvOfAllChannels", "not a depthwise convolution of stride 1"),
    ],
)
def test_near_miss_names_the_condition(name: str, reason: str) -> None:
    found, _ = fused(scripted(LOOK_ALIKES[name], example()))
    reasons = [miss.reason for miss in found.near_misses] + [match.note for match in found.matches]
    assert [given for given in reasons if reason in given], reasons


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


def test_separable_attention_of_patches() -> None:
    module = SeparableImages()
    x = torch.randn(2, 8, 4, 6, generator=torch.Generator().manual_seed(0))
    found, model = fused(scripted(module, x, axes={0: "b", 3: "n"}))
    assert operators(found) == ["AftSimple"], found.near_misses
    assert_equal(module, model, x, x[:1, :, :, :5])


def test_half_precision_is_read_through_casts() -> None:
    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = x.float().softmax(1).half()
            return torch.sigmoid(x) * (weight * x).sum(1, keepdim=True)

    found, _ = fused(scripted(Half(), example().half()))
    assert operators(found) == ["AftSimple"]


_TEXT = """
<ir_version: 9, opset_import: ["" : %d]>
g (float[batch, tokens, 8] q, float[batch, tokens, 8] k, float[batch, tokens, 8] v)
  => (float[batch, tokens, 8] y)
<float tiny = {%s}, int64[1] one = {1}>
{
  e = Exp(k)
  weighted = Mul(e, v)
  numerator = %s
  total = %s
  denominator = Add(total, tiny)
  gate = Sigmoid(q)
  mean = Div(numerator, denominator)
  y = Mul(gate, mean)
}
"""
_SUMS = ("ReduceSum(weighted, one)", "ReduceSum(e, one)")


@pytest.mark.parametrize("tiny", ["1e-8", "1e-30"])
def test_smallest_eps_is_not_dropped(tiny: str) -> None:
    found, _ = fused(onnx.parser.parse_model(_TEXT % (20, tiny, *_SUMS)))
    assert operators(found) == ["AftSimple"]
    assert found.matches[0].attributes["eps"] == pytest.approx(float(tiny), rel=1e-6, abs=0.0)


def test_zero_addition_to_graph_inputs_fuses() -> None:
    found, _ = fused(onnx.parser.parse_model(_TEXT % (20, "0", *_SUMS)))
    assert operators(found) == ["AftSimple"]


def test_queries_of_other_sequence_are_ignored() -> None:
    """Queries and keys of different sequences are left as they are."""
    text = _TEXT % (20, "0", *_SUMS)
    for name in "kv":
        text = text.replace(f"tokens, 8] {name}", f"others, 8] {name}")
    found, _ = fused(onnx.parser.parse_model(text))
    assert operators(found) == []
    assert "of different sequences" in found.near_misses[0].reason


def test_one_axis_may_have_several_names() -> None:
    text = (_TEXT % (20, "0", *_SUMS)).replace("tokens, 8] k", "others, 8] k")
    found, _ = fused(onnx.parser.parse_model(text))
    assert operators(found) == ["AftSimple"]


def test_graph_may_hold_sequences() -> None:
    joined = """whole = Mul(gate, mean)
  parts = SplitToSequence <axis = 2> (whole)
  y = ConcatFromSequence <axis = 2> (parts)"""
    text = (_TEXT % (20, "0", *_SUMS)).replace("y = Mul(gate, mean)", joined)
    found, _ = fused(onnx.parser.parse_model(text))
    assert operators(found) == ["AftSimple"]


def test_deep_size_expression_is_read_quickly() -> None:
    """Each part of the expression is read once, however many ways lead to it."""
    # A size is squared and its root taken, 40 times: there are 2^40 ways from the last to it.
    steps = "\n".join(f"b{n} = Mul(a{n}, a{n})  a{n + 1} = Sqrt(b{n})" for n in range(40))
    scaled = f"""shape = Shape(q)
  two = Constant <value_int = 2> ()
  size = Gather(shape, two)
  a0 = Cast <to = 1> (size)
  {steps}
  scaled = Mul(q, a40)
  gate = Sigmoid(scaled)"""
    text = (_TEXT % (20, "0", *_SUMS)).replace("gate = Sigmoid(q)", scaled)
    found, _ = fused(onnx.parser.parse_model(text))
    assert operators(found) == ["AftSimple"]


def test_files_of_older_opsets_are_converted() -> None:
    sums = ("ReduceSum <axes = [1]> (weighted)", "ReduceSum <axes = [1]> (e)")
    found, model = fused(onnx.parser.parse_model(_TEXT % (11, "0", *sums)))
    assert operators(found) == ["AftSimple"]
    assert opset_of(model) >= 18


def _masked(mask: str, weigh: str) -> str:
    text = _TEXT % (20, "0", *_SUMS)
    text = text.replace("8] v)", f"8] v, {mask}[batch, tokens, 1] mask)")
    return text.replace("e = Exp(k)", f"all = Exp(k)\n{weigh}")


@pytest.mark.parametrize("kind", ["bool", "int64"])
def test_boolean_or_integer_input_is_mask(kind: str) -> None:
    text = _masked(kind, "ones = Cast <to = 1> (mask)\ne = Mul(all, ones)")
    found, _ = fused(onnx.parser.parse_model(text))
    assert operators(found) == ["AftSimple"], found.near_misses


def test_derived_mask_equals_mask() -> None:
    lines = (
        "not = Not(mask)\nleft_out = Cast <to = 9> (not)\nzero = Constant <value_float = 0.0> ()\n"
        "some = Where(mask, all, zero)\ne = Where(left_out, zero, some)"
    )
    found, _ = fused(onnx.parser.parse_model(_masked("bool", lines)))
    assert operators(found) == ["AftSimple"], found.near_misses


def test_float_input_is_not_mask() -> None:
    found, _ = fused(onnx.parser.parse_model(_masked("float", "e = Mul(all, mask)")))
    assert operators(found) == []
    assert "the input mask, which may be any number" in found.near_misses[0].reason


_MASKED_ROWS = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[batch, tokens, 8] q, float[batch, tokens, 8] k, float[batch, tokens, 8] v,
   %s[batch, tokens, 1] mask) => (float[batch, tokens, 8] y)
<float eps = {1e-3}, int64[1] one = {1}, int64[1] two = {2}>
{
  counts = Cast <to = 1> (mask)
  of_queries = Relu(q)
  rows = Mul(of_queries, counts)
  of_keys = Relu(k)
  columns = Transpose <perm = [0, 2, 1]> (of_keys)
  context = MatMul(columns, v)
  numerator = MatMul(rows, context)
  total = ReduceSum(of_keys, one)
  products = Mul(rows, total)
  sums = ReduceSum(products, two)
  denominator = Add(sums, eps)
  y = Div(numerator, denominator)
}
"""


@pytest.mark.parametrize("kind", ["bool", "int64", "float"])
def test_query_rows_may_be_weighed(kind: str) -> None:
    """Numbers of rows multiply the features of queries; a mask multiplies the result."""
    found, _ = fused(onnx.parser.parse_model(_MASKED_ROWS % kind))
    assert operators(found) == ["NormalizedLinearAttention"], found.near_misses
    feature_map = "identity" if kind == "float" else "relu"
    assert found.matches[0].attributes["feature_map"] == feature_map


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
