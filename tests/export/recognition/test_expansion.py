"""Opsets that no released runtime loads are lowered where no node needs them."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from aftexport.errors import UsageError
from aftexport.recognition.standard_recurrence.expansion import lower_opset, raise_opset


def graph_of(opset: int, *nodes: onnx.NodeProto) -> ir.Model:
    """Return a graph from ``x`` to the first output of the last node."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 8, "T"])]
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)]
    scale = onnx.numpy_helper.from_array(np.ones(8, np.float32), "scale")
    graph = helper.make_graph(nodes, "small", inputs, outputs, [scale])
    imports = [helper.make_opsetid("", opset)]
    return ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=10))


def node(op_type: str, *names: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, names[:-1], names[-1:], **attributes)


@pytest.mark.parametrize("opset", [27, 28])
def test_opset_is_lowered_where_nodes_agree(opset: int) -> None:
    model = graph_of(
        opset,
        node("Transpose", "x", "turned", perm=[0, 2, 1]),
        node("Cast", "turned", "cast", to=TensorProto.FLOAT),
        node("Einsum", "cast", "summed", equation="btc->bc"),
    )
    x = np.random.default_rng(0).standard_normal((2, 8, 5)).astype(np.float32)
    before = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})[0]
    lower_opset(model)
    assert model.opset_imports[""] == 20
    after = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})[0]
    np.testing.assert_array_equal(before, after)


def test_lowest_opset_has_every_operator() -> None:
    model = graph_of(27, node("RMSNormalization", "x", "scale", "y", axis=1))
    lower_opset(model)
    assert model.opset_imports[""] == 23


def test_changed_meaning_keeps_opset() -> None:
    """The GroupNormalization of opset 20 has a scale for each group, not for each channel."""
    model = graph_of(27, node("GroupNormalization", "x", "scale", "scale", "y", num_groups=2))
    lower_opset(model)
    assert model.opset_imports[""] == 21


def test_older_opset_stays() -> None:
    model = graph_of(26, node("CumProd", "x", "scale", "y"))
    lower_opset(model)
    assert model.opset_imports[""] == 26


@pytest.mark.parametrize(
    ("opset", "given", "op_type"),
    [
        (28, node("SwiGLU", "x", "y"), "SwiGLU"),
        (27, node("LinearAttention", "x", "x", "x", "y"), "LinearAttention"),
    ],
)
def test_newer_operator_is_named(opset: int, given: onnx.NodeProto, op_type: str) -> None:
    given.name = "culprit"
    with pytest.raises(UsageError, match=f"got opset {opset}.*'culprit' .{op_type}"):
        lower_opset(graph_of(opset, given))


def test_opset_is_raised() -> None:
    model = graph_of(20, node("Softmax", "x", "y"))
    raise_opset(model, 27)
    assert model.opset_imports[""] == 27


@pytest.mark.parametrize(
    ("opset", "given"),
    [
        (20, node("GroupNormalization", "x", "x", "x", "y", num_groups=2)),
        (19, node("GridSample", "x", "x", "y", mode="bilinear")),
        (19, node("DFT", "x", "y")),
    ],
    ids=["scale", "mode", "axis"],
)
def test_changed_meaning_is_not_raised(opset: int, given: onnx.NodeProto) -> None:
    """Opset 20 calls the mode linear, and its DFT is over the last axis but one, not the second."""
    with pytest.raises(UsageError, match=given.op_type):
        raise_opset(graph_of(opset, given), 27)


def test_unknown_opset_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx.defs, "onnx_opset_version", lambda: 24)
    with pytest.raises(UsageError, match=r"knows opsets up to 24, got 27\. Install a newer onnx"):
        lower_opset(graph_of(27, node("Softmax", "x", "y")))
    with pytest.raises(UsageError, match="opsets up to 24, got 27"):
        raise_opset(graph_of(20, node("Softmax", "x", "y")), 27)
