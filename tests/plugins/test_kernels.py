"""The fused kernels, as ONNX Runtime runs them, against the operators' definitions in float64."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

from aftexport.parity import TOLERANCES

from .checks import OPS, WITH_HEADS, attributes_of, check
from .runner import INPUTS, one_node, random_inputs, run, run_with_constant, session_of

GATED = [op for op in OPS if "Aft" in op]
AFT_FULL = ["AftFull", "CausalAftFull"]
WINDOWED = [op for op in OPS if op.endswith(("AftLocal", "AftConv"))]
BFLOAT16_BOUND = 1e-2
INT8_BOUND = TOLERANCES["int8"].bound


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("batch", "tokens", "dim", "heads", "window"),
    [
        (1, 1, 1, 1, 1),
        (1, 1, 16, 4, 3),
        (2, 7, 13, 1, 2),
        (1, 15, 16, 2, 31),
        (1, 17, 64, 8, 9),
        (3, 31, 48, 3, 5),
        (1, 97, 40, 5, 12),
        (2, 101, 36, 1, 40),
        (1, 257, 32, 1, 31),
        (1, 300, 20, 20, 128),
    ],
)
def test_equals_its_definition(op, batch, tokens, dim, heads, window):
    inputs = random_inputs(op, batch, tokens, dim, heads=heads, window=window)
    check(op, inputs, **attributes_of(op, heads))


def test_heads_of_more_than_a_million_channels():
    inputs = random_inputs("Fastformer", 1, 2, 2 * 1_500_001, heads=2)
    check("Fastformer", inputs, **attributes_of("Fastformer", 2))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_extreme_keys_and_biases(op, scale):
    inputs = random_inputs(op, 2, 50, 24, heads=2, window=6, scale=scale)
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", OPS)
def test_lengths(op):
    inputs = random_inputs(op, 5, 70, 32, heads=4, window=8, lengths=[0, 1, 33, 69, 70])
    check(op, inputs, **attributes_of(op, 4))


@pytest.mark.parametrize("op", OPS)
def test_padding_does_not_leak(op):
    inputs = random_inputs(op, 1, 60, 32, heads=4, window=8, lengths=[41])
    clean = run(op, inputs, **attributes_of(op, 4))
    for x in inputs[:3]:
        x[:, 41:] = 300.0
    spoilt = run(op, inputs, **attributes_of(op, 4))
    assert np.isfinite(spoilt).all()
    np.testing.assert_allclose(clean[:, :41], spoilt[:, :41], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("which", "bad"), [(0, np.nan), (1, np.nan), (2, np.nan), (1, np.inf)])
def test_what_is_no_number_is_not_hidden(op, dtype, which, bad):
    if op.endswith("NormalizedLinearAttention") and dtype == np.float16 and bad == np.inf:
        pytest.skip("its sums are infinite, which float16 tensors hold as their largest number")
    inputs = random_inputs(op, 2, 70, 32, heads=4, window=8, dtype=dtype, lengths=[60, 70])
    clean = run(op, inputs, **attributes_of(op, 4))
    inputs[which][0, 37, 0] = bad
    result = run(op, inputs, **attributes_of(op, 4))
    reached = slice(37, 60 if which == 1 else 38)
    assert np.isnan(result[0, reached, 0]).all()
    np.testing.assert_array_equal(result[1], clean[1])


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("which", "bad"), [(1, np.nan), (2, np.nan), (3, np.nan), (1, np.inf), (3, np.inf)]
)
@pytest.mark.parametrize("constant", [True, False])
def test_what_is_no_number_is_not_hidden_in_a_reduced_precision(precision, which, bad, constant):
    inputs = random_inputs("AftFull", 2, 70, 32, lengths=[60, 70])
    inputs[3] = biases_within(1.0, 70)
    at = (40, 37) if which == 3 else (0, 37, 0)
    inputs[which][at] = bad
    if constant:
        result = run_with_constant("AftFull", "position_bias", inputs, precision=precision)
    else:
        result = run("AftFull", inputs, precision=precision)
    assert np.isnan(result[0, 40, 0])


def test_a_query_that_is_no_number_leaves_other_rows_as_they_were():
    inputs = random_inputs("EfficientAttention", 1, 16, 64)
    inputs[0][0, 3, 8] = 120.0
    clean = run("EfficientAttention", inputs, num_heads=1)
    inputs[0][0, 5, 0] = np.nan
    result = run("EfficientAttention", inputs, num_heads=1)
    others = np.arange(16) != 5
    np.testing.assert_allclose(result[0, others], clean[0, others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", GATED)
@pytest.mark.parametrize("gate", ["tanh", "none"])
def test_gates(op, gate):
    inputs = random_inputs(op, 1, 33, 20, heads=2, window=4)
    check(op, inputs, gate=gate, **attributes_of(op, 2))


@pytest.mark.parametrize("op", OPS)
def test_float16(op):
    inputs = random_inputs(op, 2, 65, 40, heads=2, window=7, dtype=np.float16, lengths=[65, 20])
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [3, 40, 200])
def test_a_large_key_late(op, tokens):
    inputs = random_inputs(op, 1, tokens, 16, heads=2, window=5)
    inputs[1][0, -1] = 120.0
    inputs[1][0, tokens // 2, ::3] = 90.0
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", [op for op in OPS if not op.endswith("Fastformer")])
@pytest.mark.parametrize(
    "levels", [(-300.0, -300.0), (-300.0, 0.0), (0.0, -300.0), (30.0, 0.0), (0.0, 30.0)]
)
def test_keys_whose_level_changes(op, levels):
    inputs = random_inputs(op, 1, 400, 16, heads=2, window=5)
    inputs[1][0, :290] += levels[0]
    inputs[1][0, 290:] += levels[1]
    inputs[0][0, 100:140] *= 20.0
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", [op for op in OPS if not op.endswith("Fastformer")])
def test_keys_of_minus_infinity_do_not_count(op):
    inputs = random_inputs(op, 1, 90, 24, heads=2, window=5)
    inputs[1][0, :9] = -np.inf
    inputs[1][0, 40:70, ::2] = -np.inf
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", AFT_FULL)
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("tokens", [1, 12, 33, 257, 530])
def test_bfloat16_products_are_within_their_bound(op, tokens, scale):
    inputs = random_inputs(op, 2, tokens, 40, scale=scale, lengths=[tokens, tokens // 3])
    check(op, inputs, bound=BFLOAT16_BOUND, precision="bf16")


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("span", [0.0, 1.0, 2.0, 2.1])
@pytest.mark.parametrize("tokens", [12, 257, 530])
def test_bfloat16_products_are_within_their_bound_however_far_biases_lie_apart(tokens, span, scale):
    """Up to some span of a row, 16-bit integers take the place of bfloat16 in some processors."""
    inputs = random_inputs("AftFull", 2, tokens, 40, scale=scale, lengths=[tokens, tokens // 3])
    inputs[3] = biases_within(span, tokens)
    check("AftFull", inputs, bound=BFLOAT16_BOUND, precision="bf16")


@pytest.mark.parametrize("op", AFT_FULL)
def test_bfloat16_products_of_a_large_key_late(op):
    inputs = random_inputs(op, 1, 400, 16)
    inputs[1][0, -1] = 120.0
    inputs[1][0, 200, ::3] = 90.0
    inputs[3][:, ::3] = -80.0
    check(op, inputs, bound=BFLOAT16_BOUND, precision="bf16")


@pytest.mark.parametrize("op", AFT_FULL)
def test_a_mean_of_equal_values_loses_no_more_than_bfloat16_rounds(op):
    inputs = random_inputs(op, 1, 300, 16, scale=3.0)
    inputs[2][:] = 0.7
    actual = run(op, inputs, gate="none", precision="bf16")
    np.testing.assert_allclose(actual, np.float32(0.7), rtol=2**-8)


@pytest.mark.parametrize("op", AFT_FULL)
def test_precision_is_float32_unless_bfloat16_is_asked_for(op):
    inputs = random_inputs(op, 1, 90, 24)
    exact = run(op, inputs)
    for precision in ("fp32", "fp16"):
        np.testing.assert_array_equal(run(op, inputs, precision=precision), exact)


@pytest.mark.skipif(
    "avx512_bf16" not in Path("/proc/cpuinfo").read_text() or "AFTEXPORT_ISA" in os.environ,
    reason="no AVX512_BF16 here, or AFTEXPORT_ISA may forbid it",
)
@pytest.mark.parametrize("op", AFT_FULL)
def test_bfloat16_is_computed_where_the_processor_can(op):
    inputs = random_inputs(op, 1, 90, 24)
    assert (run(op, inputs, precision="bf16") != run(op, inputs)).any()


def biases_within(span, tokens):
    """A position bias [tokens, tokens] whose rows span so much, and so do their beginnings."""
    bias = np.random.default_rng(0).random((tokens, tokens)) * span
    bias[:, 0], bias[:, 1:2] = 0.0, span
    return bias.astype(np.float32)


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0, 4.0, 10.0, 100.0])
@pytest.mark.parametrize("tokens", [1, 12, 33, 257, 513, 1030])
def test_int8_products_are_within_their_bound(tokens, scale):
    inputs = random_inputs("AftFull", 2, tokens, 40, scale=scale, lengths=[tokens, tokens // 3])
    inputs[3] = biases_within(1.0, tokens)
    check("AftFull", inputs, bound=INT8_BOUND, precision="int8")


def test_many_keys_far_below_the_largest_do_not_vanish_in_int8():
    inputs = random_inputs("AftFull", 1, 500, 16)
    inputs[1][:] = 0.0
    inputs[1][0, 17] = 6.5  # as much as 665 others, which are a fifth of a step each
    inputs[2][:] = 1.0
    inputs[2][0, 17] = -1.0
    inputs[3] = biases_within(0.0, 500)
    check("AftFull", inputs, bound=INT8_BOUND, precision="int8", gate="none")


def test_a_mean_of_equal_values_stays_what_it_was_in_int8():
    inputs = random_inputs("AftFull", 1, 300, 16, scale=3.0)
    inputs[2][:] = 0.7
    inputs[3] = biases_within(1.0, 300)
    actual = run("AftFull", inputs, gate="none", precision="int8")
    np.testing.assert_allclose(actual, np.float32(0.7), rtol=3e-5)


@pytest.mark.parametrize("op", AFT_FULL)
def test_where_8_bits_are_not_safe_they_are_bfloat16(op):
    inputs = random_inputs(op, 1, 90, 24)
    inputs[3] = biases_within(0.9 if op == "CausalAftFull" else 1.1, 90)
    np.testing.assert_array_equal(
        run(op, inputs, precision="int8"), run(op, inputs, precision="bf16")
    )


@pytest.mark.skipif(
    "avx512_vnni" not in Path("/proc/cpuinfo").read_text() or "AFTEXPORT_ISA" in os.environ,
    reason="no AVX512_VNNI here, or AFTEXPORT_ISA may forbid it",
)
def test_int8_is_computed_where_the_processor_can():
    inputs = random_inputs("AftFull", 1, 90, 24)
    inputs[3] = biases_within(1.0, 90)
    rounded = run("AftFull", inputs, precision="int8")
    for wider in ("fp32", "bf16"):
        assert (rounded != run("AftFull", inputs, precision=wider)).any()


@pytest.mark.skipif(
    "avx2" not in Path("/proc/cpuinfo").read_text() or "AFTEXPORT_ISA" in os.environ,
    reason="no AVX2 here, or AFTEXPORT_ISA may forbid it",
)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_reduced_precision_is_computed_as_such_where_biases_lie_close(precision):
    inputs = random_inputs("AftFull", 1, 90, 24)
    inputs[3] = biases_within(1.0, 90)
    assert (run("AftFull", inputs, precision=precision) != run("AftFull", inputs)).any()


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_a_constant_bias_is_packed_in_bfloat16_too(scale):
    inputs = random_inputs("AftFull", 2, 300, 24, scale=scale, lengths=[300, 100])
    exact = run("AftFull", inputs)
    packed = run_with_constant("AftFull", "position_bias", inputs, precision="bf16")
    bound = BFLOAT16_BOUND * np.abs(inputs[2]).max()
    for b, length in enumerate(inputs[-1]):
        np.testing.assert_allclose(packed[b, :length], exact[b, :length], rtol=0, atol=bound)


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("span", [1.0, 1.1, 2.1])
@pytest.mark.parametrize("tokens", [90, 1000])
def test_a_constant_bias_is_packed_whole_and_serves_every_length(tokens, span, precision):
    inputs = random_inputs("AftFull", 2, tokens, 24, lengths=[tokens, tokens // 2])
    inputs[3] = biases_within(span, 1000)
    constant = run_with_constant("AftFull", "position_bias", inputs, precision=precision)
    np.testing.assert_array_equal(constant, run("AftFull", inputs, precision=precision))


@pytest.mark.parametrize("op", [*WINDOWED, *AFT_FULL])
def test_a_dominating_key_with_a_very_negative_bias(op):
    inputs = random_inputs(op, 1, 90, 16, heads=2, window=5)
    inputs[1][0, 30] = 60.0
    inputs[3][:] = np.where(np.arange(inputs[3].shape[1]) % 3 == 1, -80.0, inputs[3])
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", ["AftLocal", "CausalAftLocal"])
def test_one_row_of_band_serves_every_token(op):
    inputs = random_inputs(op, 2, 77, 16, window=9)
    one_row = inputs[3][:1]
    inputs[3] = np.repeat(one_row, 77, axis=0)
    expected = check(op, inputs)
    inputs[3] = one_row
    np.testing.assert_array_equal(check(op, inputs), expected)


@pytest.mark.parametrize("op", ["EfficientAttention", "CausalEfficientAttention"])
def test_efficient_attention_by_scaling(op):
    inputs = random_inputs(op, 2, 75, 32, lengths=[75, 20])
    check(op, inputs, num_heads=2, normalization="scaling", scale=0.5)
    check(op, inputs, num_heads=2, normalization="softmax", scale=3.0)


@pytest.mark.parametrize("op", ["NormalizedLinearAttention", "CausalNormalizedLinearAttention"])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_linear_attention_settings(op, eps):
    check(
        op, random_inputs(op, 2, 75, 32, lengths=[75, 20]), num_heads=2, feature_map="relu", eps=eps
    )
    check(
        op, random_inputs(op, 2, 75, 32, lengths=[75, 20]), num_heads=2, feature_map="elu", eps=eps
    )


@pytest.mark.parametrize("op", OPS)
def test_keys_all_equal_give_the_mean_over_many_tokens(op):
    """Rounding must not pile up: equal terms are the worst case for a running sum."""
    if op.endswith("AftFull"):
        pytest.skip("AFT-full is quadratic: 65,536 tokens take minutes")
    tokens, dim = 65_536, 16
    inputs = random_inputs(op, 1, tokens, dim, heads=2, window=4)
    inputs[1][:] = 0.1
    inputs[2][:] = np.linspace(0.3, 0.9, tokens, dtype=np.float32)[None, :, None]
    if op.endswith(("AftLocal", "AftConv")):
        inputs[3][:] = 0.0
    if op.endswith("Fastformer"):
        inputs[0][:] = 0.1
    attributes = attributes_of(op, 2) | ({"gate": "none"} if op in GATED else {})
    actual = run(op, inputs, **attributes)[0, [0, 1000, tokens - 1], 0].astype(np.float64)
    value = inputs[2][0, :, 0].astype(np.float64)
    mean = (
        np.cumsum(value) / np.arange(1, tokens + 1)
        if op.startswith("Causal")
        else np.full(tokens, value.mean())
    )
    if op.endswith("Fastformer"):
        mean = value * np.float64(np.float32(0.1)) ** 2
    np.testing.assert_allclose(actual, mean[[0, 1000, tokens - 1]], rtol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_threads_share_the_work_without_a_trace(op):
    inputs = random_inputs(op, 1, 700, 64, heads=4, window=16)
    one = run(op, inputs, threads=1, **attributes_of(op, 4))
    for _ in range(3):
        np.testing.assert_array_equal(run(op, inputs, threads=4, **attributes_of(op, 4)), one)


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shape_and_scale(op, data):
    heads = data.draw(st.integers(1, 5), "heads")
    tokens = data.draw(st.integers(1, 80), "tokens")
    inputs = random_inputs(
        op,
        batch := data.draw(st.integers(1, 3), "batch"),
        tokens,
        heads * data.draw(st.integers(1, 35), "width"),
        heads=heads,
        window=data.draw(st.integers(1, 90), "window"),
        scale=data.draw(st.sampled_from([0.01, 1.0, 10.0, 100.0, 1000.0]), "scale"),
        lengths=data.draw(
            st.lists(st.integers(0, tokens), min_size=batch, max_size=batch), "lengths"
        ),
        seed=data.draw(st.integers(0, 2**32 - 1), "seed"),
    )
    check(op, inputs, **attributes_of(op, heads))


@pytest.mark.parametrize("shape", [None, [None] * 3, ["batch", None, 4], ["batch", "tokens", 4]])
def test_what_is_not_known_of_a_shape_is_left_open(shape):
    model = one_node("AftSimple")
    node, graph = model.graph.node[0], model.graph
    node.input[0] = "given"
    graph.node.insert(0, helper.make_node("Reshape", ["query", "target"], ["given"]))
    graph.node.extend([
        helper.make_node("Shape", ["result"], ["shape"]),
        helper.make_node("MatMul", ["result", "value"], ["product"]),
    ])  # fmt: skip
    graph.input.append(helper.make_tensor_value_info("target", TensorProto.INT64, [None]))
    if shape is not None:
        graph.value_info.append(helper.make_tensor_value_info("given", TensorProto.FLOAT, shape))
    graph.output.extend([
        helper.make_tensor_value_info("shape", TensorProto.INT64, [3]),
        helper.make_tensor_value_info("product", TensorProto.FLOAT, [None] * 3),
    ])  # fmt: skip
    inputs = random_inputs("AftSimple", 2, 4, 4)
    feeds = dict(zip(INPUTS["AftSimple"], inputs, strict=True))
    found, product = session_of(model).run(
        ["shape", "product"], {**feeds, "target": np.array([2, 4, 4])}
    )
    assert found.tolist() == [2, 4, 4]
    assert product.shape == (2, 4, 4)


@pytest.mark.parametrize("op", WITH_HEADS)
def test_there_is_one_head_unless_more_are_asked_for(op):
    inputs = random_inputs(op, 1, 10, 8)
    np.testing.assert_array_equal(run(op, inputs), run(op, inputs, num_heads=1))


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"scale": 7}, "scale is of a wrong type, expected a float"),
        ({"scale": "7"}, "scale is of a wrong type, expected a float"),
        ({"num_heads": 2.5}, "num_heads is of a wrong type, expected an integer"),
        ({"normalization": 1}, "normalization is of a wrong type, expected text"),
    ],
)
def test_an_attribute_of_a_wrong_type_is_not_taken_for_none(attribute, expected):
    inputs = random_inputs("EfficientAttention", 1, 10, 8)
    with pytest.raises(RuntimeException, match=f"EfficientAttention: {expected}"):
        run("EfficientAttention", inputs, **attribute)


def test_errors_name_operator_shapes_and_reason():
    def message(op, inputs, **attributes):
        with pytest.raises((Fail, InvalidArgument, RuntimeException)) as error:
            run(op, inputs, **attributes)
        return str(error.value)

    inputs = random_inputs("AftFull", 1, 10, 4)
    inputs[3] = inputs[3][:6, :6]
    assert (
        "AftFull: query has shape [1, 10, 4], longer than position_bias [6, 6] allows"
        in message("AftFull", inputs)
    )
    inputs = random_inputs("CausalAftLocal", 1, 10, 4, window=3)
    inputs[3] = inputs[3][:9]
    assert "CausalAftLocal: query has shape [1, 10, 4], longer than band [9, 3] allows" in message(
        "CausalAftLocal", inputs
    )
    inputs = random_inputs("EfficientAttention", 1, 10, 10)
    assert "not divisible by num_heads 3" in message("EfficientAttention", inputs, num_heads=3)
    inputs = random_inputs("AftSimple", 1, 10, 4)
    assert "key has shape [1, 9, 4], expected [1, 10, 4]" in message(
        "AftSimple", [inputs[0], inputs[1][:, :9], *inputs[2:]]
    )
    assert 'gate is "relu", expected sigmoid, tanh or none' in message(
        "AftSimple", inputs, gate="relu"
    )
    assert 'precision is "int4", expected fp32, fp16, bf16 or int8' in message(
        "AftFull", random_inputs("AftFull", 1, 10, 4), precision="int4"
    )
    inputs[-1] = np.array([1, 2], np.int64)
    assert "lengths has shape [2], expected [1]" in message("AftSimple", inputs)
