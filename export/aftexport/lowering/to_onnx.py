"""From a captured program to an ONNX graph with custom operators.

ONNX with bare custom nodes first; then the portable bodies, attached last, because the
exporter would inline them.
"""

import onnx
import onnx.inliner
import torch
from torch.export import ExportedProgram

from aftexport.capture.random_operators import drawing_error, drawing_node, error_of_node
from aftexport.capture.shape_guards import ShapeGuard, record_shape_guards
from aftexport.capture.torch_logs import quiet
from aftexport.contract import AXES
from aftexport.errors import TraceError, UsageError
from aftexport.lowering.exact_rules import exactly
from aftexport.lowering.file_format import lower_format
from aftexport.lowering.random_nodes import random_node
from aftexport.lowering.size_floats import cast_size_floats
from aftexport.lowering.translations import translations
from aftexport.lowering.untranslated import untranslated
from aftexport.operators.domain import opset_of

_aten = torch.ops.aten
_FILLS = (
    (_aten.masked_fill_.Scalar, _aten.masked_fill.Scalar),
    (_aten.masked_fill_.Tensor, _aten.masked_fill.Tensor),
    (_aten.masked_scatter_.default, _aten.masked_scatter.default),
)
OPSETS = range(18, 26)
"""Opsets the bodies are written for and torch.onnx can produce."""
DEFAULT_OPSET = 20


def lower(program: ExportedProgram, *, opset: int = DEFAULT_OPSET) -> onnx.ModelProto:
    """Lowers a captured program to ONNX with bare custom nodes.

    Args:
        program: see ``capture.capture``.
        opset: of the standard operators.

    Returns:
        The graph, with the shapes of what is between.

    Raises:
        UsageError: for an opset outside ``OPSETS``.
        TraceError: where torch.onnx knows no translation of an operator, or the graph is random.
    """
    model = _translated(program, opset).model_proto
    if random_node(model) is not None:
        node = drawing_node(program)
        raise error_of_node(node) if node is not None else drawing_error("", "")
    produced = opset_of(model)
    if produced != opset:
        raise TraceError(
            f"torch.onnx produced opset {produced} where {opset} was asked for.",
            f"Leave out --opset, or ask for {DEFAULT_OPSET}.",
        )
    _strip_metadata(model)
    lower_format(model)
    return model


def decomposed(program: ExportedProgram, *, opset: int = DEFAULT_OPSET) -> ExportedProgram:
    """The operators that ``lower`` translates, each named as its result is in the ONNX graph.

    Args:
        program: see ``capture.capture``.
        opset: as given to ``lower``.

    Raises:
        UsageError, TraceError: see ``lower``.
    """
    found = _translated(program, opset).exported_program
    assert found is not None  # it was given
    return found


def _translated(program: ExportedProgram, opset: int) -> torch.onnx.ONNXProgram:
    if opset not in OPSETS:
        raise UsageError(
            f"Opset {opset} is not supported.", f"Choose one from {OPSETS[0]} to {OPSETS[-1]}."
        )
    names = tuple(str(n) for n in program.graph_signature.user_inputs)
    shapes = {n: dict(AXES[n]) for n in names}
    _keep_strides(program)
    cast_size_floats(program)
    taken: list[ShapeGuard] = []
    try:
        with quiet(), exactly(), record_shape_guards(taken):
            exported = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=opset,
                custom_translation_table=translations(),
                dynamic_shapes=shapes,
                input_names=list(names),
                output_names=["logits"],
                verbose=False,
            )
    except Exception as error:
        raise untranslated(program, error) from error
    if found := next((t for t in taken if not (t.of_memory or t.holds_always)), None):
        raise TraceError(
            f"torch.onnx translates the model only for sizes where {found}{found.place}.",
            "Write that line in operators that do the same for every length."
            if found.line
            else "Take what branches on such a size out of forward: lengths of max(0, n - tokens), "
            "as of padding to n, and slices of them.",
        )
    assert exported is not None
    return exported


def _keep_strides(program: ExportedProgram) -> None:
    """Writes what fills a tensor in place as a copy into it, which computes the same.

    torch takes the result of these for contiguous where the tensor is not, and then finds no
    way back from it to what the tensor is a view of: ``k.masked_fill_(mask, 0)`` of heads.
    """
    for in_place, filled in _FILLS:
        for node in program.graph.find_nodes(op="call_function", target=in_place):
            with program.graph.inserting_before(node):
                result = program.graph.call_function(filled, node.args, node.kwargs)
            node.target, node.args, node.kwargs = _aten.copy_.default, (node.args[0], result), {}
            result.meta.update(node.meta)
    program.graph_module.recompile()


def _strip_metadata(model: onnx.ModelProto) -> None:
    """Removes what torch.onnx notes of the source: it leaks paths and differs by machine."""
    graph = model.graph
    for item in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info,
                 *graph.initializer, *model.functions):  # fmt: skip
        del item.metadata_props[:]
        item.doc_string = ""
    graph.name = "main"
