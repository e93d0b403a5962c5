"""Translation of a captured program to an ONNX graph with custom operators.

The graph has bare custom nodes. Their portable bodies are attached later, because the exporter
would inline them.
"""

import copy
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import onnx
import onnx.inliner
import torch
from onnxscript.rewriter.pattern import Constant, RewriteRule
from torch import Tensor, fx
from torch.export import ExportedProgram

from aftexport.capture.failure import drawing_error, drawing_node, draws, error_of_node
from aftexport.capture.input_spec import upper_bound
from aftexport.capture.model_outputs import output_names
from aftexport.capture.shape_guards import ShapeGuard, last_own_line, record_shape_guards
from aftexport.capture.torch_messages import quiet
from aftexport.errors import TraceError, first_line
from aftexport.lowering.file_format import check_opset, lower_format
from aftexport.lowering.graph_values import random_node
from aftexport.lowering.size_floats import cast_mixed_inputs, cast_size_floats
from aftexport.lowering.translations import translations
from aftexport.operators.domain import opset_of
from aftexport.system.contract import AXES, DEFAULT_OPSET, main_input
from aftexport.system.internals.onnxscript_rules import (
    DEFAULT_RULES,
    DROPOUT_RULES,
    NO_OP_RULES,
    use_rules,
)
from aftexport.system.internals.torch_operators import OpOverload
from aftexport.system.internals.torch_shapes import allow_sizes_of_one
from aftexport.system.internals.torch_translation import (
    DispatchError,
    ONNXRegistry,
    list_composites_once,
)
from aftexport.system.process import collection_paused

_aten = torch.ops.aten


_FILLS = (
    (_aten.masked_fill_.Scalar, _aten.masked_fill.Scalar),
    (_aten.masked_fill_.Tensor, _aten.masked_fill.Tensor),
    (_aten.masked_scatter_.default, _aten.masked_scatter.default),
)


def lower(program: ExportedProgram, *, opset: int = DEFAULT_OPSET) -> onnx.ModelProto:
    """Lower a captured program to ONNX with bare custom nodes.

    The graph has the shapes of intermediate values.

    Raises:
        UsageError: if the opset is outside ``file_format.OPSETS``.
        TraceError: if torch.onnx cannot translate an operator, or the graph is random.
    """
    outputs = output_names(program)  # before the translation changes the program
    translated = _translated(program, opset, outputs)
    assert translated.exported_program is not None  # torch.onnx received a program
    if error := _bfloat16_error(translated.exported_program):
        raise error
    model = translated.model_proto
    _name_outputs(model, outputs)
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
    """Return the program that ``lower`` translates, named as in the graph; raises as it does."""
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
                custom_translation_table=translations(),
                dynamic_shapes=shapes,
                input_names=list(names),
                output_names=_passing_names(outputs),
                verbose=False,
            )
    except Exception as error:
        raise _untranslated(program, error) from error
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


def max_tokens(program: ExportedProgram) -> int:
    """Return the largest number of tokens that a program takes."""
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


# onnxscript's rules treat a constant within 1e-8 of 0 as 0 and one within 1e-5 of 1 as 1. They drop
# the epsilon of x / (y + 1e-9) and log(x + 1e-10), which keeps rows of zeros finite.
def _exactly(value: int) -> Constant:
    return Constant(value, rel_tol=0, abs_tol=0)


def _identity(op: Any, x: Any, **_: Any) -> Any:
    return op.Identity(x)


_EXACT = (
    *RewriteRule(lambda op, x: op.Mul(x, _exactly(1)), _identity).commute(),
    *RewriteRule(lambda op, x: op.Add(x, _exactly(0)), _identity).commute(),
    RewriteRule(lambda op, x: op.Sub(x, _exactly(0)), _identity),
    RewriteRule(lambda op, x: op.Div(x, _exactly(1)), _identity),
    *DROPOUT_RULES,
)
_INEXACT = frozenset(map(id, NO_OP_RULES))
_RULES = (*_EXACT, *(rule for rule in DEFAULT_RULES if id(rule) not in _INEXACT))


def exactly() -> AbstractContextManager[None]:
    """Limit torch.onnx to rewrite rules that hold for every number, during the block."""
    return use_rules(_RULES)


_PREFIX = "output_of_forward_"


def _passing_names(names: Sequence[str]) -> list[str]:
    """Return names for the outputs during the translation, which no other value has.

    torch.onnx names values by their operators, and fails if an output has the same name.
    """
    return [f"{_PREFIX}{place}" for place in range(len(names))]


def _name_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Replace ``_passing_names`` by ``names``, in place; rename other values of these names."""
    graph = model.graph
    taken = {name for node in graph.node for name in (*node.output, *node.input)}
    taken |= {value.name for value in (*graph.initializer, *graph.input)}
    renamed = {}
    for name in taken & set(names):
        count = 1
        while (other := f"{name}_{count}") in taken or other in names:
            count += 1
        renamed[name] = other
        taken.add(other)
    renamed |= dict(zip(_passing_names(names), names, strict=True))
    _rename(graph, renamed)


def _rename(graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = renamed.get(name, name)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename(inner, renamed)
    for value in (*graph.output, *graph.value_info, *graph.initializer):
        value.name = renamed.get(value.name, value.name)


# torch.onnx reads its table of translations at every export. For this it parses the source of 500
# functions, which takes a third of the translation of a small model: read it once for a process.
_METHOD = "from_torchlib"
_ORIGINAL = vars(ONNXRegistry)[_METHOD]
_read = ONNXRegistry.from_torchlib
_LOCK = threading.RLock()


@contextmanager
def shared_table() -> Iterator[None]:
    """Give torch.onnx copies of the table during the block."""
    with _LOCK:  # the method is shared by the whole process
        setattr(ONNXRegistry, _METHOD, staticmethod(_copied))
        try:
            yield
        finally:
            setattr(ONNXRegistry, _METHOD, _ORIGINAL)


@cache
def _table(opset_version: int) -> ONNXRegistry:
    return _read(opset_version)


def _copied(opset_version: int) -> ONNXRegistry:
    """Return a copy to which torch.onnx can add the translations of one export."""
    table = copy.copy(_table(opset_version))
    table.functions = {target: list(found) for target, found in table.functions.items()}
    return table


_MOVES = (_aten._to_copy.default, _aten.clone.default, _aten.cat.default, _aten.embedding.default)


_REMEDY = "Replace it by operators that ONNX has."


def _untranslated(program: ExportedProgram, error: BaseException) -> TraceError:
    """Return the error for a captured program that torch.onnx failed to translate."""
    # The program still has the user's operators: the error names a part, such as prims.prod in
    # cumprod.
    node = _node(error)
    if node is None:
        return TraceError(
            f"torch.onnx cannot translate the model: {first_line(error)}",
            "Replace the operator in this error by operators that ONNX has.",
        )
    own = _node_of(program, node)
    if draws(own):
        return error_of_node(own)
    operator, line = _operator(own, node), last_own_line(node.meta)
    place = f" ({line})" if line else ""
    if not _is_missing(error):
        reason, remedy = first_line(error).rstrip("."), _REMEDY
    else:
        causes = (cause for holds, *cause in _CAUSES if holds(program, node))
        reason, remedy = next(causes, ("ONNX has no such operator", _REMEDY))
    return TraceError(f"torch.onnx cannot translate {operator}{place}: {reason}.", remedy)


def _operator(own: fx.Node, node: fx.Node) -> str:
    target = own.target if isinstance(node.target, OpOverload) else node.target
    return str(target).rpartition(".")[0] if "." in str(target) else str(target)


def _node(error: BaseException | None) -> fx.Node | None:
    """Return the node whose translation raised the error; None if unknown."""
    current = None
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            node = frame.f_locals.get("node")
            if isinstance(node, fx.Node) and node.op == "call_function":
                current = node
        error = error.__cause__
    return current


def _node_of(program: ExportedProgram, node: fx.Node) -> fx.Node:
    """Return the program's node that torch.onnx decomposed into ``node``: both have one call."""
    call = node.meta.get("torch_fn")
    calls = [n for n in program.graph.nodes if call and n.meta.get("torch_fn") == call]
    same = [n for n in calls if isinstance(n.target, OpOverload)]
    is_whole = node.target in [n.target for n in same]
    return same[-1] if same and not is_whole else node


def _is_missing(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, DispatchError):
            return True
        error = error.__cause__
    return False


def _has_flex_attention(program: ExportedProgram, node: fx.Node) -> bool:
    return any("flex_attention" in str(n.target) for n in program.graph.nodes)


def _is_complex(program: ExportedProgram, node: fx.Node) -> bool:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return any(isinstance(value, Tensor) and value.is_complex() for value in values)


def _is_shift(program: ExportedProgram, node: fx.Node) -> bool:
    return "shift" in str(node.target)


def _bfloat16_error(program: ExportedProgram) -> TraceError | None:
    """Return the error for a decomposed program in bfloat16 with weights of another type."""
    # ONNX Runtime runs a model of bfloat16 weights in float32.
    if any(tensor.dtype == torch.bfloat16 for tensor in program.state_dict.values()):
        return None
    node = next((n for n in program.graph.nodes if _computes_in_bfloat16(n)), None)
    if node is None:
        return None
    line = last_own_line(node.meta)
    return TraceError(
        "Expected operators in float32 or float16, which ONNX Runtime has on the CPU, got "
        f"{_operator(node, node)} in bfloat16{f' ({line})' if line else ''}.",
        "Remove torch.autocast and casts to bfloat16 from forward: --precision chooses the type.",
    )


def _computes_in_bfloat16(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bfloat16:
        return False
    is_operator = isinstance(node.target, OpOverload) and not node.target.is_view
    return is_operator and node.target not in _MOVES


_CAUSES: tuple[tuple[Callable[[ExportedProgram, fx.Node], bool], str, str], ...] = (
    (
        _has_flex_attention,
        "flex_attention has no translation, nor has its block mask",
        "Call scaled_dot_product_attention, with the mask as attn_mask.",
    ),
    (
        _is_complex,
        "it computes with complex numbers, for which it has no translation",
        "Compute the real and the imaginary part as two tensors of real numbers.",
    ),
    (
        _is_shift,
        "it translates shifts by a constant number only",
        "Write x // 2**k in place of x >> k, and x * 2**k in place of x << k.",
    ),
)
"""Conditions on a node without a translation, each with the reason and the remedy."""
