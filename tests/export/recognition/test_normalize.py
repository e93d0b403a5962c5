"""Normalization keeps graphs valid, and removes only nodes without effect at any size."""

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from sampling import any_case

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.recognition.graph.normalize import normalize, remove_no_ops
from aftexport.recognition.graph.shape_probe import probe

from . import implementations
from .graphs import BATCH, TOKENS, assert_equal, fused, operators
from .layer import DIM

_IF = """
    h = Relu(x)
    z = If(c) <
        then_branch = first () => (float[b, t, 4] p) {{ {0} }},
        else_branch = second () => (float[b, t, 4] q) {{ {1} }}>
"""
_BODIES = {
    "both branches": _IF.format("p = Identity(h)", "q = Identity(h)") + "y = Add(z, x)",
    "one branch": _IF.format("p = Identity(h)", "q = Exp(x)") + "y = Add(z, x)",
    "no operation": _IF.format("p = Cast <to = 1> (h)", "q = Dropout(h)") + "y = Add(z, x)",
    "graph input": _IF.format("p = Identity(x)", "q = Identity(x)") + "y = Add(z, h)",
    "branch of a branch": _IF.format(
        """p = If(c) <
            then_branch = third () => (float[b, t, 4] r) { r = Identity(h) },
            else_branch = fourth () => (float[b, t, 4] s) { s = Identity(h) }>""",
        "q = Identity(h)",
    )
    + "y = Add(z, x)",
    "loop": """
        h = Relu(x)
        y = Loop(n, c, x) <body = body (int64 i, bool go, float[b, t, 4] state)
            => (bool next, float[b, t, 4] last) { next = Identity(c) last = Identity(h) }>
    """,
    "two outputs": "y = Relu(x) twice = Identity(y)",
    "input": "y = Relu(x) twice = Identity(x)",
}


@pytest.mark.parametrize("name", _BODIES)
def test_normalize_keeps_values_handed_on(name: str) -> None:
    body = _BODIES[name]
    more = ", float[b, t, 4] twice" * ("twice" in body)
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
        graph (float[b, t, 4] x, int64 n, bool c) => (float[b, t, 4] y{more}) {{ {body} }}""")
    onnx.checker.check_model(model)
    normalized = ir.to_proto(normalize(model))
    onnx.checker.check_model(normalized)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    before, after = (OnnxRuntimeEngine(m.SerializeToString()) for m in (model, normalized))
    for condition in (True, False):
        inputs = {"x": x, "n": np.array(2), "c": np.array(condition)}
        expected, found = before.run(inputs), after.run(inputs)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value)


def test_normalize_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Weights that are inputs or outputs too are left alone without a warning for each."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 20]>
        graph (float[b, 4] x, float[4] w) => (float[b, 4] y, float[1] c)
        <float[4] w = {1, 2, 3, 4}> { c = Constant <value_floats = [1.0]> () y = Mul(x, w) }""")
    normalize(model)
    assert not caplog.records


_TEXT = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[batch, tokens, 8] x) => (float[batch, tokens, 8] y)
<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] all = {9223372036854775807},
 int64[1] many = {1000}, int64[1] channels = {8}, int64[6] nothing = {0, 0, 0, 0, 0, 0},
 int64[3] kept = {0, 0, 8}, bool training = {1},
 int64 axis = {1}, int64 block = {1024}, int64[2] none = {0, 0}, float half = {0.5}>
{
  shape = Shape(x)
  length = Slice(shape, one, two)
  a = Relu(x)
  %s
  y = Sigmoid(b)
}
"""


def left(line: str) -> tuple[list[str], int]:
    """Return the operators left between two others, and the number of doubtful ones."""
    model = normalize(onnx.parser.parse_model(_TEXT % line))
    doubtful = remove_no_ops(model, probe(ir.to_proto(model)))
    return [node.op_type for node in model.graph], len(doubtful)


@pytest.mark.parametrize(
    "line",
    [
        "b = Slice(a, zero, all, one)",
        "b = Slice(a, zero, all)",
        "b = Slice(a, zero, channels, two, one)",
        "b = Slice(a, zero, length, one)",
        "b = Pad(a, nothing)",
        "b = Pad <mode = \"reflect\"> (a, nothing)",
        "b = Concat <axis = 1> (a)",
        "b = Cast <to = 1> (a)",
        "b = Reshape(a, kept)",
        "b = Reshape(a, shape)",
        "b = Expand(a, shape)",
        "b = Expand(a, one)",
        "b = Transpose <perm = [0, 1, 2]> (a)",
        "b = Identity(a)",
        "b = Dropout(a)",
        "b = Dropout(a, half)",
        "b = Sum(a)",
        "b = Max(a)",
        "b = Clip(a)",
        "b = Split <axis = 2, num_outputs = 1> (a)",
        "c = Identity(a)  d = Slice(c, zero, all)  b = Concat <axis = 0> (d)",
    ],
)  # fmt: skip
def test_nothing_is_left_of_no_ops(line: str) -> None:
    assert left(line) == (["Relu", "Sigmoid"], 0)


@pytest.mark.parametrize(
    ("line", "last", "doubtful"),
    [
        ("b = Slice(a, zero, many, one)", "Slice", 1),
        ("n = Min(length, many)  b = Slice(a, zero, n, one)", "Slice", 1),
        ("n = Mod(length, block)  b = Slice(a, zero, n, one)", "Slice", 1),
        ("n = Max(length, many)  b = Slice(a, zero, n, one)", "Slice", 1),
        ("b = Slice(a, zero, all, one, two)", "Slice", 0),
        ("b = Slice(a, one, all, two)", "Slice", 0),
        ("b = Dropout(a, half, training)", "Dropout", 0),
        ("b = Transpose <perm = [0, 2, 1]> (a)", "Transpose", 0),
        ("c = Cast <to = 10> (a)  b = Cast <to = 1> (c)", "Cast", 0),
    ],
)
def test_nodes_with_effect_stay(line: str, last: str, doubtful: int) -> None:
    found, count = left(line)
    assert (found[-2:], count) == ([last, "Sigmoid"], doubtful)


@pytest.mark.table(keep=0.34, by=any_case)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["simple_shifted", "conv_causal", "linear_padded_tokens_last"])
def test_unoptimized_graphs_are_recognized(name: str) -> None:
    operator, layer = implementations.layers()[name]
    x = torch.randn(2, 12, DIM, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(layer.eval(), (x,), dynamic_shapes=({0: BATCH, 1: TOKENS},))
    converted = torch.onnx.export(program, (), dynamo=True, optimize=False, verbose=False)
    assert converted is not None
    found, model = fused(converted.model_proto)
    assert operators(found) == [operator], found.near_misses
    assert_equal(layer, model, x)
