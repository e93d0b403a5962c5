"""Graphs written as text are recognized as exported ones are."""

import onnx
import onnx.parser
import pytest

from aftexport.operators.domain import opset_of

from .graphs import fused, operators

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
