"""From a captured program to an ONNX graph with custom operators.

ONNX with bare custom nodes first; then the portable bodies, attached last, because the
exporter would inline them.
"""

from collections import Counter, defaultdict

import onnx
import onnx.inliner
import onnx_ir as ir
import torch
from torch.export import ExportedProgram

from aftexport.boolean_triangles import widen_boolean_triangles
from aftexport.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION, opset_of
from aftexport.errors import TraceError, UsageError
from aftexport.export_attempts import AXES
from aftexport.file_format import lower_format
from aftexport.fuse.encoder import fuse_encoder
from aftexport.fuse.fastformer import fuse_fastformer
from aftexport.fuse.pooling import fuse_pooling
from aftexport.fuse.random_nodes import random_node
from aftexport.optimizer_faults import avoid_optimizer_faults
from aftexport.position_bias import choose_precisions
from aftexport.random_operators import drawing_error, drawing_node, error_of_node
from aftexport.registry import ALL_OPERATORS
from aftexport.rewriting import exactly
from aftexport.size_floats import cast_size_floats
from aftexport.sizes import Taken, noting_sizes
from aftexport.small_sigmoids import keep_small_sigmoids
from aftexport.torch_logs import quiet
from aftexport.translations import translations
from aftexport.untranslated import untranslated

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
    taken: list[Taken] = []
    try:
        with quiet(), exactly(), noting_sizes(taken):
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


def finish(
    lowered: onnx.ModelProto, *, precision: str = "fp32", fuse: bool = True
) -> onnx.ModelProto:
    """Fuses what surrounds the attention, and gives every custom node its portable body.

    Args:
        lowered: see ``lower``; not changed.
        precision: fp16 where the program is; bf16 or int8 for the products inside kernels.
        fuse: make operators of what surrounds the attention, and products of sums over the tokens.
            TensorRT fuses that itself, and their bodies would have it multiply in float32.
    """
    graph = ir.from_proto(lowered)
    if fuse:
        products = "fp32" if precision == "fp16" else precision
        fuse_fastformer(graph, precision=products)
        fuse_encoder(graph, precision=products)
        fuse_pooling(graph)
    model = ir.to_proto(graph)
    widen_boolean_triangles(model)
    keep_small_sigmoids(model)
    avoid_optimizer_faults(model)
    # Intermediate shapes are inferred again by every runtime; torch's carry its symbols.
    del model.graph.value_info[:]
    choose_precisions(model, precision)
    return attach_bodies(model)


def attach_bodies(model: onnx.ModelProto) -> onnx.ModelProto:
    """Gives every custom operator in ``model`` its portable body, one function per operator.

    A function cannot branch on an attribute, so where nodes of one operator differ
    in a setting, the commonest keeps the operator and the body of the others is
    inlined in standard ops.
    """
    opset = opset_of(model)
    nodes = [n for n in model.graph.node if n.domain == DOMAIN]
    by_operator: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for node in nodes:
        for name, value in PLUGIN_ATTRIBUTES.items():
            if not any(a.name == name for a in node.attribute):
                node.attribute.append(onnx.helper.make_attribute(name, value))
        by_operator[node.op_type][_settings(node)] += 1

    inlined = []
    for op_type, counts in sorted(by_operator.items()):
        operator = ALL_OPERATORS[op_type]
        for rank, (chosen, _) in enumerate(counts.most_common()):
            names = [a.name for a in operator.settings]
            function = operator.function(dict(zip(names, chosen, strict=True)), opset)
            if rank:
                function.name = f"{op_type}_{'_'.join(chosen)}"
                inlined.append((DOMAIN, function.name))
                for node in nodes:
                    if node.op_type == op_type and _settings(node) == chosen:
                        node.op_type = function.name
            model.functions.append(function)
    if nodes and not any(o.domain == DOMAIN for o in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    if inlined:
        model = onnx.inliner.inline_selected_functions(model, inlined)
    return model


def _settings(node: onnx.NodeProto) -> tuple[str, ...]:
    operator = ALL_OPERATORS[node.op_type]
    chosen = operator.attributes_of(node)
    return tuple(str(chosen[a.name]) for a in operator.settings)


def _strip_metadata(model: onnx.ModelProto) -> None:
    """Removes what torch.onnx notes of the source: it leaks paths and differs by machine."""
    graph = model.graph
    for item in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info,
                 *graph.initializer, *model.functions):  # fmt: skip
        del item.metadata_props[:]
        item.doc_string = ""
    graph.name = "main"
