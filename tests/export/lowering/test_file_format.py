import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from aftexport.lowering.file_format import OPSETS, lower_format
from aftexport.operators.domain import DOMAIN


def model(opset: int, element: int = TensorProto.FLOAT) -> onnx.ModelProto:
    value = helper.make_tensor_value_info("x", element, [None])
    node = helper.make_node("Identity", ["x"], ["y"])
    result = helper.make_tensor_value_info("y", element, [None])
    imports = [helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("", opset)]
    return helper.make_model(
        helper.make_graph([node], "g", [value], [result]), opset_imports=imports, ir_version=10
    )


@pytest.mark.parametrize(
    ("opset", "expected"), [(18, 8), (19, 9), (20, 9), (21, 10), (23, 10), (OPSETS[-1], 10)]
)
def test_version_is_oldest_with_opset(opset: int, expected: int) -> None:
    lower_format(changed := model(opset))
    assert changed.ir_version == expected


@pytest.mark.parametrize(
    ("element", "expected"),
    [(TensorProto.FLOAT16, 8), (TensorProto.FLOAT8E4M3FN, 9), (TensorProto.INT4, 10)],
)
def test_element_type_needs_later_version(element: int, expected: int) -> None:
    lower_format(changed := model(18, element))
    assert changed.ir_version == expected


def test_a_type_inside_a_subgraph_counts() -> None:
    inner = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["z"], to=TensorProto.UINT4)],
        "inner",
        [],
        [onnx.ValueInfoProto(name="z")],
    )
    changed = model(18)
    yes = onnx.numpy_helper.from_array(np.array(True), "yes")
    changed.graph.initializer.append(yes)
    changed.graph.node.append(
        helper.make_node("If", ["yes"], ["w"], then_branch=inner, else_branch=inner)
    )
    lower_format(changed)
    assert changed.ir_version == 10
