"""Casts and constants of a graph."""

import numpy as np
import onnx
import onnx.parser
import pytest

from aftexport.engines.tensorrt.graph.network import Network
from aftexport.engines.tensorrt.graph.simplify import (
    fold_constants,
    infer_types,
    remove_idle_casts,
)


def simplified(text: str) -> onnx.ModelProto:
    header = '<ir_version: 10, opset_import: ["" : 20, "custom" : 1]>\n'
    network = Network(onnx.parser.parse_model(header + text))
    for rewrite in (infer_types, remove_idle_casts, fold_constants):
        rewrite(network)
    network.graph.cleanup().toposort()
    model = network.to_model()
    onnx.checker.check_model(model)
    return model


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_idle_cast_leaves() -> None:
    """The type of a value between nodes is inferred."""
    model = simplified("""g (float16[n] x) => (float[n] y, float16[n] z) {
        a = Relu(x)
        b = Cast <to = 10> (a)
        c = Cast <to = 1> (b)
        y = Relu(c)
        z = Cast <to = 10> (x)
    }""")
    assert sorted(operators(model)) == ["Cast", "Cast", "Relu", "Relu"]
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    assert {cast.input[0] for cast in casts} == {"a", "x"}


def test_cast_of_unknown_type_stays() -> None:
    model = simplified("""g (float[n] x) => (float[n] y) {
        a = custom.Unknown(x)
        b = Cast <to = 1> (a)
        y = Relu(b)
    }""")
    assert "Cast" in operators(model)


def test_small_constants_are_folded() -> None:
    model = simplified("""g (float[n] x) => (float[n] y) <float w = {2.0}> {
        one = Constant <value = float {1.0}> ()
        three = Add(w, one)
        y = Mul(x, three)
    }""")
    assert operators(model) == ["Mul"]
    (weight,) = model.graph.initializer
    assert onnx.numpy_helper.to_array(weight) == 3


@pytest.mark.parametrize(
    "body",
    [
        "c = Expand(w, shape)",  # 16 TiB
        "c = RandomNormalLike(w)",
        "c = custom.Unknown(w)",
        "b = Cast <to = 16> (w)\n c = Cast <to = 1> (b)",
    ],
    ids=["large", "random", "custom", "bfloat16"],
)
def test_other_constants_stay(body: str) -> None:
    model = simplified(f"""g (float[n] x) => (float[n, m] y)
        <float[1, 1] w = {{2.0}}, int64[2] shape = {{2097152, 2097152}}> {{
        {body}
        y = Mul(x, c)
    }}""")
    assert len(model.graph.node) > 1


def test_fraction_of_size_is_kept() -> None:
    """Folding of shapes would turn the factor into an integer, 0."""
    model = simplified("""g (float[n] x) => (int64[1] y) <float half = {0.5}> {
        size = Shape(x)
        wide = Cast <to = 1> (size)
        part = Mul(wide, half)
        y = Cast <to = 7> (part)
    }""")
    assert operators(model) == ["Shape", "Cast", "Mul", "Cast"]
    result = onnx.reference.ReferenceEvaluator(model).run(None, {"x": np.zeros(9, np.float32)})
    np.testing.assert_array_equal(result, [[4]])
