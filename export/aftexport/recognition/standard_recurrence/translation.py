"""The recurrent nodes of other domains in a graph, each replaced by an operator of ours."""

from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from aftexport.errors import UsageError
from aftexport.lowering.nodes import NewNodes, take_place
from aftexport.operators.domain import DOMAIN, VERSION
from aftexport.recognition.standard_recurrence.full_lengths import FullLengths
from aftexport.recognition.standard_recurrence.node_reading import NodeReading
from aftexport.recognition.standard_recurrence.node_values import (
    CAUSAL_CONV,
    LINEAR_ATTENTION,
    MICROSOFT,
    REMEDY,
    Arrays,
    ForeignNode,
    NotTranslatable,
    is_foreign,
    is_standard,
    title,
)
from aftexport.recognition.standard_recurrence.read_causal_conv import CausalConvReading
from aftexport.recognition.standard_recurrence.read_linear_attention import LinearAttentionReading

_READINGS: dict[str, type[NodeReading]] = {
    LINEAR_ATTENTION: LinearAttentionReading,
    CAUSAL_CONV: CausalConvReading,
}


@dataclass(frozen=True)
class Replacement:
    """A node that was replaced.

    Attributes:
        source: the operator of the file, with its domain.
        operator: the operator of our domain.
        value: the name of the first output.
    """

    source: str
    operator: str
    value: str


@dataclass
class Translation:
    """The result for a graph.

    Attributes:
        replaced: the nodes that were replaced, in the order of the graph.
        left: the operator, the first output and the reason for each node that stays.
    """

    replaced: list[Replacement] = field(default_factory=list)
    left: list[tuple[str, str, str]] = field(default_factory=list)


def check_foreign_nodes(model: ir.Model) -> bool:
    """Return whether a graph, without its subgraphs, has a recurrent node of another domain.

    Raises:
        UsageError: if the attributes of a node, or the presence of its inputs, violate its
            definition.
    """
    nodes = [node for node in model.graph if is_foreign(node)]
    for node in nodes:
        try:
            _READINGS[node.op_type](ForeignNode(node, {})).check()
        except NotTranslatable as reason:
            if is_standard(node):
                raise _not_standard(ForeignNode(node, {}), reason) from reason
    return bool(nodes)


def _not_standard(given: ForeignNode, reason: NotTranslatable) -> UsageError:
    """Return the error of a standard node that no operator of ours, and no runtime, computes."""
    return UsageError(
        f"Expected {given.label} as ONNX defines it, but {reason}.",
        REMEDY,
    )


def check_sizes(node: ir.Node, run: Arrays) -> None:
    """Raise UsageError if the sizes of the inputs of a node violate its definition."""
    _READINGS[node.op_type](ForeignNode(node, run)).check_sizes()


def translate(model: ir.Model, run: Arrays) -> Translation:
    """Replace the recurrent nodes of other domains in place.

    Args:
        model: the graph, normalized and without model-local functions.
        run: the values of the graph by name in one run.

    Raises:
        UsageError: if a node violates its own definition.
    """
    result, known = Translation(), dict[ir.Value, ir.Value]()
    for node in list(model.graph):
        if not is_foreign(node):
            continue
        value = str(node.outputs[0].name)
        source = title(node)
        reading = _READINGS[node.op_type]
        new = NewNodes(model.graph, value)
        given = ForeignNode(node, run)
        try:
            outputs = reading(given).translate(FullLengths(new, known), new)
        except NotTranslatable as reason:
            if is_standard(node):
                raise _not_standard(given, reason) from reason
            result.left.append((source, value, str(reason)))
            continue
        model.graph.insert_before(node, new.nodes)
        for old, replacing in zip(node.outputs, outputs, strict=False):
            take_place(old, replacing)
        model.graph.remove(node, safe=True)
        result.replaced.append(Replacement(source, reading.operator, value))
    if result.replaced:
        model.opset_imports[DOMAIN] = VERSION
        cancel_transposes(model.graph)
        CommonSubexpressionEliminationPass()(model)
        RemoveUnusedNodesPass()(model)
        if not any(node.domain == MICROSOFT for node in model.graph.all_nodes()):
            model.opset_imports.pop(MICROSOFT, None)
    return result


def cancel_transposes(graph: ir.Graph) -> None:
    """Let the readers of two transposes that undo each other read the source of the first."""
    for second in [n for n in graph if n.op_type == "Transpose" and n.domain == ""]:
        value = second.inputs[0]
        first = None if value is None else value.producer()
        if first is None or first.op_type != "Transpose" or second.outputs[0].is_graph_output():
            continue
        order, before = _permutation(second), _permutation(first)
        if order is None or before is None or [before[i] for i in order] != sorted(order):
            continue
        source = first.inputs[0]
        assert source is not None  # a transpose has an input
        second.outputs[0].replace_all_uses_with(source)


def _permutation(node: ir.Node) -> list[int] | None:
    found = node.attributes.get("perm")
    return None if found is None else list(found.as_ints())
