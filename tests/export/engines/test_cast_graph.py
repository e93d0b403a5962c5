import math
from pathlib import Path

import engines
import numpy as np
import onnx
import onnx.checker
import onnx.parser
import onnxruntime
import pytest

from aftexport.engines.cast_graph import add_float64_operators, has_bfloat16, widen
from aftexport.engines.onnxruntime import OnnxRuntimeEngine

INPUTS = {"input_ids": np.arange(40).reshape(2, 20), "lengths": np.array([20, 7])}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.graph(tmp_path_factory.mktemp("bf16"), "bf16")


def test_cast_graph_replaces_every_bfloat16(model: Path) -> None:
    graph = onnx.load(model)
    assert has_bfloat16(graph)
    widen(graph)
    assert not has_bfloat16(graph)
    onnx.checker.check_model(graph, full_check=False)


def test_the_weights_are_the_same_numbers(model: Path) -> None:
    narrow, wide = onnx.load(model), onnx.load(model)
    widen(wide)
    for before, after in zip(narrow.graph.initializer, wide.graph.initializer, strict=True):
        numbers = onnx.numpy_helper.to_array(before).astype(np.float64)
        np.testing.assert_array_equal(numbers, onnx.numpy_helper.to_array(after))


def test_onnxruntime_runs_the_graph_in_float32(model: Path, tmp_path: Path) -> None:
    logits = OnnxRuntimeEngine(model).run(INPUTS)["logits"]
    assert logits.dtype == np.float32
    full = OnnxRuntimeEngine(engines.graph(tmp_path, "fp32")).run(INPUTS)["logits"]
    difference = np.abs(logits - full).max()
    assert 0 < difference < 2e-2 * max(1, np.abs(full).max())


_IMPLICIT = {
    "ConstantOfShape": "y = ConstantOfShape(n)",
    "value": "k = ConstantOfShape <value = float[1] {0.5}> (n) y = Identity(k)",
    "value_floats": "k = Constant <value_floats = [0.1]> () y = Expand(k, n)",
    "value_float": "k = Constant <value_float = 0.1> () y = Expand(k, n)",
    "window": "one = Constant <value_int = 4> () y = HannWindow(one)",
    "random": "y = RandomNormal <shape = [3], seed = 1.0> ()",
    "cast": "y = Cast <to = 1> (n)",
    "sequence": "s = SequenceEmpty() t = SequenceInsert(s, x) zero = Constant <value_int = 0> ()"
    " y = SequenceAt(t, zero)",
    "branch": """c = Constant <value = bool {1}> ()
        y = If(c) <then_branch = a () => (float[w] p) { p = ConstantOfShape(n) },
            else_branch = b () => (float[w] q) { q = ConstantOfShape(n) }>""",
}


@pytest.mark.parametrize("name", _IMPLICIT)
def test_implicit_float32_becomes_float64(name: str) -> None:
    """An operator whose output is float32 without an attribute meets a tensor of float64."""
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
        graph (float[w] x, int64[1] n) => (float[w] z) {{ {_IMPLICIT[name]} z = Mul(x, y) }}""")
    onnx.checker.check_model(model, full_check=True)
    widen(model, (onnx.TensorProto.FLOAT,), onnx.TensorProto.DOUBLE)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    width = 4 if name == "window" else 3
    (z,) = session.run(None, {"x": np.ones(width), "n": np.array([width])})
    assert z.dtype == np.float64


@pytest.mark.parametrize(("operator", "opset"), [("Erf", 18), ("Erf", 20), ("Gelu", 20)])
def test_operator_is_exact_in_float64(operator: str, opset: int) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> '
        f"graph (double[n] x) => (double[n] y) {{ y = {operator} (x) }}"
    )
    add_float64_operators(model)
    x = np.concatenate([np.linspace(-7, 7, 9001), [0.0, 1e-300, -1e-12, 1e3, -1e3]])
    y = OnnxRuntimeEngine(model.SerializeToString(), fused=False).run({"x": x})["y"]
    exact = np.array([math.erf(v if operator == "Erf" else v / math.sqrt(2)) for v in x])
    if operator == "Gelu":
        exact = 0.5 * x * (1 + exact)
    np.testing.assert_allclose(y, exact, rtol=1e-13, atol=2e-15)
