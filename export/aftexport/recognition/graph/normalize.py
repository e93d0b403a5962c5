"""Normalization of a graph by the passes of onnx, onnx_ir and onnxscript."""

import logging

import onnx
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    LiftConstantsToInitializersPass,
    NameFixPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
)
from onnxscript import optimizer

from aftexport.operators.domain import opset_of

MIN_OPSET = 18
"""The first opset that the portable bodies of the operators support."""
TARGET_OPSET = 20
_MAX_SHARED_NUMBERS = 2**16
"""The most numbers of a constant that is compared with the others."""
_FIRST_OVERRIDABLE_IR = 4
"""The first IR version whose initializers among the inputs may be overridden."""
# It warns of each initializer that is an input or an output of the graph too.
logging.getLogger(DeduplicateInitializersPass.__module__).setLevel(logging.ERROR)


def normalize(model: onnx.ModelProto) -> ir.Model:
    """Return a copy with functions inlined, constants folded and common subexpressions merged.

    A model with an older opset than the portable bodies support is converted to a later opset. If
    the IR version requires each initializer among the inputs, those inputs are removed.
    """
    is_old = model.ir_version < _FIRST_OVERRIDABLE_IR
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    if opset_of(model) < MIN_OPSET:
        model = onnx.version_converter.convert_version(model, TARGET_OPSET)
    graph = ir.from_proto(model)
    if is_old:
        RemoveInitializersFromInputsPass()(graph)
    LiftConstantsToInitializersPass()(graph)
    optimizer.fold_constants(graph)
    LiftConstantsToInitializersPass()(graph)
    _remove_identities(graph)
    for step in (
        # Exporters write a constant once for each use, as the positions above and below a division.
        DeduplicateInitializersPass(_MAX_SHARED_NUMBERS),
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        NameFixPass(),
    ):
        step(graph)
    return graph


def _remove_identities(model: ir.Model) -> None:
    """Remove nodes Identity, except where a graph needs one to hand on a value as its output."""
    # onnx_ir's pass also takes those by which a branch or a loop's body hands on an outer value.
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type != "Identity" or node.domain != "" or node.inputs[0] is None:
            continue
        source, output, graph = node.inputs[0], node.outputs[0], node.graph
        assert graph is not None
        if output.is_graph_output():
            producer = source.producer()
            is_own = producer is not None and producer.graph is graph
            if not is_own or source.is_graph_output():
                continue
            source.name = output.name
        ir.convenience.replace_all_uses_with(output, source, replace_graph_outputs=True)
        graph.remove(node, safe=True)
