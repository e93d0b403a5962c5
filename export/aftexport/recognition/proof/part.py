"""The part of a graph between a formula's value and the leaves of the formula, run in float64."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from aftexport.engines.cast_graph import widen_nodes
from aftexport.operators.domain import DOMAIN
from aftexport.operators.schema import OnnxOperator
from aftexport.recognition.graph.shape_probe import Arrays, ProbedGraph, any_above
from aftexport.recognition.proof.definitions import definition
from aftexport.recognition.read import layout

Array = NDArray[np.generic]


class ProofError(Exception):
    """A part of the graph cannot be run by itself; the message has the reason."""


@dataclass(frozen=True)
class Part:
    """A part of a graph that can be run: nodes, constants, inputs and the output."""

    nodes: Sequence[ir.Node]
    constants: Mapping[str, Array]
    inputs: Sequence[ir.Value]
    output: str


def part_of(
    value: ir.Value,
    ends: Iterable[ir.Value],
    probed: ProbedGraph,
    new_constants: Mapping[ir.Value, Array] | None = None,
    max_nodes: int = sys.maxsize,  # upper bound of the part's nodes
) -> Part:
    """Return the part of the graph from ``ends`` to ``value``.

    Shapes and masks that are not computed from ``ends`` are inputs too. Of a mask and its negation,
    the mask is the input.

    Raises:
        ProofError: for more than ``max_nodes``.
    """
    boundary = _Boundary(frozenset(ends), probed)
    constants: dict[str, Array] = {}
    nodes: dict[ir.Node, None] = {}
    inputs: dict[ir.Value, None] = {}
    pending, opened = [(value, False)], 0
    while pending:
        current, is_done = pending.pop()
        node = current.producer()
        if is_done:
            assert node is not None
            nodes[node] = None
            continue
        array = (new_constants or {}).get(current, probed.constant(current))
        if array is None and probed.number(current) is not None:
            # Computed in float64, it would differ from the number that the rewrite has.
            array = probed.fixed_value(current)
        if array is not None:
            constants[str(current.name)] = array
        elif node is None or boundary.is_input(current):
            inputs[current] = None
        elif node not in nodes:
            opened += 1
            if opened > max_nodes:
                raise ProofError(f"it is computed by more than {max_nodes} nodes")
            pending.append((current, True))
            pending += [(source, False) for source in reversed(node.inputs) if source is not None]
    return Part(list(nodes), constants, list(inputs), str(value.name))


class _Boundary:
    """The boundary between the values that a part computes and the values it is given."""

    def __init__(self, ends: Collection[ir.Value], probed: ProbedGraph) -> None:
        self._ends = ends
        self._probed = probed
        self._depending: dict[ir.Value, bool] = {}

    def is_input(self, value: ir.Value) -> bool:
        """Return whether a value is given: an end, or a shape or mask not computed from ends."""
        return (
            value in self._ends
            or value.producer() is None
            or (
                self._probed.has(value)
                and not self._probed.is_float(value)
                and not _is_of_masks(value, self._probed)
                and not any_above(value, self._depending, self._depends_on_ends)
            )
        )

    def _depends_on_ends(self, value: ir.Value) -> bool | None:
        node = value.producer()
        if value in self._ends or node is None or node.op_type in ("Shape", "Size"):
            return value in self._ends
        return None


def _is_of_masks(value: ir.Value, probed: ProbedGraph) -> bool:
    """Return whether a mask is computed from other masks, which a rewrite may read instead."""
    node = value.producer()
    return (
        node is not None
        and node.op_type in ("And", "Cast", "Identity", "Not", "Or", *layout.FORMULAS)
        and probed.is_boolean(value)
        and all(probed.is_boolean(of) for of in node.inputs[:1] if of is not None)
    )


def runner(
    part: Part, opset: int, operator: Callable[..., Array] | None = None
) -> ReferenceEvaluator:
    """Return an evaluator of a part in float64.

    ``operator`` computes the one node of our domain, if the part has one.

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
