"""Evaluators of a part of a graph in float64."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from aftexport.engines.cast_graph import widen_nodes
from aftexport.operators.domain import DOMAIN
from aftexport.operators.schema import OnnxOperator
from aftexport.recognition.graph.shape_probe import Arrays
from aftexport.recognition.proof.definitions import definition
from aftexport.recognition.proof.part import Array, Part, ProofError


def runner(
    part: Part, opset: int, operator: Callable[..., Array] | None = None
) -> ReferenceEvaluator:
    """Return an evaluator of a part in float64.

    Args:
        part: the part.
        opset: the opset of the standard operators.
        operator: the function that computes the one node of our domain, if the part has one.

    Raises:
        ProofError: if the evaluator does not support an operator of the part.
    """
    protos = [ir.to_proto(node) for node in part.nodes]
    widen_nodes(protos, _FLOATS, onnx.TensorProto.DOUBLE)
    constants = {name: _widened(array) for name, array in part.constants.items()}
    for node in protos:
        if node.op_type == "CumSum" and node.input[1] in constants:
            # torch.onnx writes [axis], which runtimes accept and the evaluator does not.
            constants[node.input[1]] = constants[node.input[1]].reshape(())
    value_info = [onnx.ValueInfoProto(name=str(v.name)) for v in part.inputs]
    graph = onnx.helper.make_graph(
        protos,
        "part",
        value_info,
        [onnx.ValueInfoProto(name=part.output)],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    own = [onnx.helper.make_opsetid(DOMAIN, 1)] if operator else []
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset), *own], ir_version=10
    )
    implementations = [_implementation(operator, protos)] if operator else []
    try:
        return ReferenceEvaluator(model, new_ops=implementations)
    except Exception as error:  # the evaluator of onnx, on any graph
        raise ProofError(f"it cannot be run in float64 ({error})") from error


def _implementation(operator: Callable[..., Array], nodes: Sequence[onnx.NodeProto]) -> type[OpRun]:
    def run(self: OpRun, *inputs: Array, **_: object) -> tuple[Array]:
        return (operator(*inputs),)

    (name,) = {node.op_type for node in nodes if node.domain == DOMAIN}
    return type(name, (OpRun,), {"op_domain": DOMAIN, "_run": run})


def run_once(evaluator: ReferenceEvaluator, feeds: Arrays) -> NDArray[np.float64]:
    """Return the one output of a part; overflow is silent."""
    with np.errstate(all="ignore"):
        outputs = evaluator.run(None, dict(feeds))
    assert isinstance(outputs, list)
    return np.asarray(outputs[0], np.float64)


def in_float64(operator: OnnxOperator, attributes: Mapping[str, object]) -> Callable[..., Array]:
    """Return the float64 definition of an operator as a function of arrays."""
    own = {a.name: attributes.get(a.name, a.default) for a in operator.attributes}
    return definition(operator.op_type, own)


_FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}


def _widened(array: Array) -> Array:
    is_float = array.dtype.kind == "f" or "float" in array.dtype.name
    return np.asarray(array.astype(np.float64) if is_float else array, order="C")
