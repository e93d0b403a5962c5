"""The error for an operator that torch.onnx cannot translate, with the user's line."""

import traceback
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from aftexport.capture.random_operators import draws, error_of_node
from aftexport.capture.shape_guards import last_own_line
from aftexport.errors import TraceError, first_line
from aftexport.system.internals.torch_operators import OpOverload
from aftexport.system.internals.torch_translation import DispatchError

_aten = torch.ops.aten
_MOVES = (_aten._to_copy.default, _aten.clone.default, _aten.cat.default, _aten.embedding.default)
_REMEDY = "Replace it by operators that ONNX has."


def untranslated(program: ExportedProgram, error: BaseException) -> TraceError:
    """Return the error for a program that torch.onnx failed to translate.

    Args:
        program: the captured program, before torch.onnx decomposed its operators: its error names
            a part, such as ``prims.prod`` in ``cumprod``.
        error: the exception of torch.onnx.
    """
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


def _has_flex_attention(program: ExportedProgram, node: fx.Node) -> bool:
    return any("flex_attention" in str(n.target) for n in program.graph.nodes)


def _is_complex(program: ExportedProgram, node: fx.Node) -> bool:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return any(isinstance(value, Tensor) and value.is_complex() for value in values)


def _is_shift(program: ExportedProgram, node: fx.Node) -> bool:
    return "shift" in str(node.target)


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


def bfloat16_error(program: ExportedProgram) -> TraceError | None:
    """Return the error for a model that computes in bfloat16 with weights of another type.

    Args:
        program: the decomposed program.

    Returns:
        None if the model does not: ONNX Runtime runs a model of bfloat16 weights in float32.
    """
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


def _is_missing(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, DispatchError):
            return True
        error = error.__cause__
    return False


def _node_of(program: ExportedProgram, node: fx.Node) -> fx.Node:
    """Return the program's node that torch.onnx decomposed into ``node``: both have one call."""
    call = node.meta.get("torch_fn")
    calls = [n for n in program.graph.nodes if call and n.meta.get("torch_fn") == call]
    same = [n for n in calls if isinstance(n.target, OpOverload)]
    is_whole = node.target in [n.target for n in same]
    return same[-1] if same and not is_whole else node


def _operator(own: fx.Node, node: fx.Node) -> str:
    target = own.target if isinstance(node.target, OpOverload) else node.target
    return str(target).rpartition(".")[0] if "." in str(target) else str(target)
