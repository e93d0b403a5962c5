from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper

from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.operators.schema import STATE_OUTPUT, OnnxOperator
from aftexport.pipeline.golden_cases import _operator_inputs
from aftexport.verify.subgraph import Subgraph

OPSET = 20


HEADS = {"num_heads": 2, "q_num_heads": 4, "kv_num_heads": 2}


def attributes_of(operator: OnnxOperator) -> dict[str, Any]:
    """Return the defaults, with several heads."""
    return {a.name: HEADS.get(a.name, a.default) for a in operator.attributes}


def model_of(operator: OnnxOperator) -> onnx.ModelProto:
    """Return a model of one operator with all inputs."""
    node = helper.make_node(
        operator.op_type,
        operator.inputs,
        operator.outputs,
        domain=DOMAIN,
        **attributes_of(operator),
        **PLUGIN_ATTRIBUTES,
    )
    settings = {a.name: str(a.default) for a in operator.settings}
    return helper.make_model(
        helper.make_graph([node], "alone", [], []),
        functions=[operator.function(settings, OPSET, operator.optional)],
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
        ir_version=10,
    )


@pytest.mark.parametrize("op_type", sorted(ALL_OPERATORS))
def test_float64_body_is_definition(op_type: str) -> None:
    operator = ALL_OPERATORS[op_type]
    attributes = attributes_of(operator)
    inputs = _operator_inputs(operator, attributes, operator.optional, 100.0, np.dtype(np.float32))
    model = model_of(operator)
    for output in operator.outputs:
        subgraph = Subgraph(model, output, inputs)
        wide, defined = subgraph.run_wide(), subgraph.run_defined()
        assert wide.dtype == defined.dtype == np.float64
        rows = np.arange(wide.shape[1]) < inputs.get("lengths", np.array([67, 67]))[:, None]
        if output == STATE_OUTPUT:
            rows[:] = True
        np.testing.assert_allclose(wide[rows], defined[rows], rtol=1e-7, atol=1e-9)


def test_subgraph_holds_only_needed_nodes() -> None:
    """It starts from the given tensors."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : {OPSET}]>
        graph (float[1] x) => (float[1] w) <float[1] a = {{2}}, float[1] b = {{3}}> {{
            y = Mul (x, a)
            z = Add (y, b)
            w = Sub (z, y)
        }}""")
    one = np.ones(1, np.float32)
    whole = Subgraph(model, "w", {"x": one})
    assert [node.op_type for node in whole.model.graph.node] == ["Mul", "Add", "Sub"]
    assert whole.run(fused=False) == 3
    part = Subgraph(model, "z", {"x": one, "y": 10 * one, "w": one})
    assert [node.op_type for node in part.model.graph.node] == ["Add"]
    assert set(part.inputs) == {"y"}
    assert part.run(fused=False) == part.run_wide() == part.run_defined() == 13
    assert [tensor.name for tensor in part.model.graph.initializer] == ["b"]
