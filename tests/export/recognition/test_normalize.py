"""Normalization keeps graphs valid whose branches and loops hand on values from outside."""

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import onnx_ir as ir
import pytest

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.recognition.graph.normalize import normalize

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
