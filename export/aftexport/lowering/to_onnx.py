"""Translation of a captured program to an ONNX graph with custom operators.

The graph has bare custom nodes. Their portable bodies are attached later, because the exporter
would inline them.
"""

from collections.abc import Sequence

import onnx
import onnx.inliner
import torch
from torch.export import ExportedProgram

from aftexport.capture.input_spec import upper_bound
from aftexport.capture.model_outputs import output_names
from aftexport.capture.random_operators import drawing_error, drawing_node, error_of_node
from aftexport.capture.shape_guards import ShapeGuard, record_shape_guards
from aftexport.capture.torch_logs import quiet
from aftexport.errors import TraceError
from aftexport.lowering.exact_rules import exactly
from aftexport.lowering.file_format import check_opset, lower_format
from aftexport.lowering.output_names import name_outputs, passing_names
from aftexport.lowering.random_nodes import random_node
from aftexport.lowering.size_floats import cast_mixed_inputs, cast_size_floats
from aftexport.lowering.translation_table import shared_table
from aftexport.lowering.translations import translations
from aftexport.lowering.untranslated import bfloat16_error, untranslated
from aftexport.operators.domain import opset_of
from aftexport.system.contract import AXES, DEFAULT_OPSET, main_input
from aftexport.system.internals.torch_composites import list_composites_once
from aftexport.system.internals.torch_shapes import allow_sizes_of_one
from aftexport.system.process import collection_paused

_aten = torch.ops.aten
_FILLS = (
    (_aten.masked_fill_.Scalar, _aten.masked_fill.Scalar),
    (_aten.masked_fill_.Tensor, _aten.masked_fill.Tensor),
    (_aten.masked_scatter_.default, _aten.masked_scatter.default),
)


def lower(program: ExportedProgram, *, opset: int = DEFAULT_OPSET) -> onnx.ModelProto:
    """Lower a captured program to ONNX with bare custom nodes.

    Args:
        program: the result of ``capture.capture``.
        opset: the opset of the standard operators.

    Returns:
        The graph, with the shapes of intermediate values.

    Raises:
        UsageError: if the opset is outside ``file_format.OPSETS``.
        TraceError: if torch.onnx cannot translate an operator, or the graph is random.
    """
    outputs = output_names(program)  # before the translation changes the program
    translated = _translated(program, opset, outputs)
    assert translated.exported_program is not None  # torch.onnx received a program
    if error := bfloat16_error(translated.exported_program):
        raise error
    model = translated.model_proto
    name_outputs(model, outputs)
    if random_node(model) is not None:
        node = drawing_node(program)
        raise error_of_node(node) if node is not None else drawing_error("", "")
    produced = opset_of(model)
    if produced != opset:
        raise TraceError(
            f"Expected opset {opset} from torch.onnx, got {produced}.",
            f"Omit --opset, or give --opset {DEFAULT_OPSET}.",
        )
    _strip_metadata(model)
    lower_format(model)
    return model


def decomposed(program: ExportedProgram, *, opset: int = DEFAULT_OPSET) -> ExportedProgram:
    """Return the program of the operators that ``lower`` translates, named as in the ONNX graph.

    Args:
        program: the result of ``capture.capture``.
        opset: the opset of ``lower``.

    Raises:
        UsageError, TraceError: if ``lower`` raises them.
    """
    translated = _translated(program, opset, output_names(program)).exported_program
    assert translated is not None  # torch.onnx received a program
    return translated


def _translated(
    program: ExportedProgram, opset: int, outputs: Sequence[str]
) -> torch.onnx.ONNXProgram:
    check_opset(opset)
    names = tuple(str(n) for n in program.graph_signature.user_inputs)
    shapes = _axes(program)
    _keep_strides(program)
    cast_size_floats(program)
    guards: list[ShapeGuard] = []
    try:
        # torch.onnx parses the source of 500 functions. In CPython 3.11 (gh-106905) a collection in
        # ast.parse may let another thread parse, and then both raise SystemError.
        # Without sizes of 1, torch 2.9 takes branches for sizes above 1 in its decompositions.
        with (
            collection_paused(),
            quiet(),
            exactly(),
            shared_table(),
            list_composites_once(),
            allow_sizes_of_one(True),
            record_shape_guards(guards),
        ):
            exported = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=opset,
                custom_translation_table=translations(_max_tokens(program)),
                dynamic_shapes=shapes,
                input_names=list(names),
                output_names=passing_names(outputs),
                verbose=False,
            )
    except Exception as error:
        raise untranslated(program, error) from error
    if guard := next((g for g in guards if not (g.is_of_layout or g.is_always_true)), None):
        raise TraceError(
            "Expected a translation for every length, got one from torch.onnx only for sizes "
            f"where {guard}{guard.place}.",
            "Write that line in operators that do the same for every length."
            if guard.line
            else "Remove branches on such sizes from forward: lengths of max(0, n - tokens), as in "
            "padding to n, and slices of them.",
        )
    assert exported is not None
    cast_mixed_inputs(exported.model)
    return exported


def _max_tokens(program: ExportedProgram) -> int:
    """Return the maximum tokens of a document."""
    names = tuple(map(str, program.graph_signature.user_inputs))
    main = next(
        n for n in program.graph.find_nodes(op="placeholder") if n.name == main_input(names)
    )
    tokens = main.meta["val"].shape[1]
    return tokens if isinstance(tokens, int) else upper_bound(program, tokens)


def _axes(program: ExportedProgram) -> dict[str, dict[int, str]]:
    """Return the names of the dynamic axes of each input; extra inputs have those of the tokens."""
    names = tuple(map(str, program.graph_signature.user_inputs))
    inputs = [n for n in program.graph.find_nodes(op="placeholder") if n.name in names]
    shapes = {n.name: n.meta["val"].shape for n in inputs}
    main = shapes[main_input(names)]
    axes = {}
    for name in names:
        dynamic = {axis for axis, size in enumerate(shapes[name]) if not isinstance(size, int)}
        own = {
            axis: "tokens" if str(shapes[name][axis]) == str(main[1]) else "batch"
            for axis in dynamic
        }
        axes[name] = dict(AXES.get(name, own))
    return axes


def _keep_strides(program: ExportedProgram) -> None:
    """Replace operators that fill a tensor in place by a fill and a copy into the tensor.

    torch assumes that the result of a fill in place is contiguous. For other tensors, such as
    the heads in ``k.masked_fill_(mask, 0)``, it then cannot write back to the viewed tensor.
    """
    for in_place, filled in _FILLS:
        for node in program.graph.find_nodes(op="call_function", target=in_place):
            with program.graph.inserting_before(node):
                result = program.graph.call_function(filled, node.args, node.kwargs)
            node.target, node.args, node.kwargs = _aten.copy_.default, (node.args[0], result), {}
            result.meta.update(node.meta)
    program.graph_module.recompile()


def _strip_metadata(model: onnx.ModelProto) -> None:
    """Remove torch.onnx's notes of the source: they leak paths and differ between machines."""
    graph = model.graph
    for item in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info,
                 *graph.initializer, *model.functions):  # fmt: skip
        del item.metadata_props[:]
        item.doc_string = ""
    graph.name = "main"
