"""Operators of a forward that draw random numbers, which an exported graph cannot repeat."""

import traceback
from typing import Any

import torch
from torch import fx

from aftexport.capture.shape_guards import is_the_users, last_own_line, line_of
from aftexport.errors import TraceError
from aftexport.system.internals.torch_operators import OpOverload

_SWITCHES = ("train", "training")
"""Arguments whose value False switches drawing off."""
_SHARES = ("dropout", "dropout_p")
"""Arguments whose value 0 switches drawing off."""


def drawing_error(operator: str, line: str) -> TraceError:
    """Return the error for a model that draws random numbers; both are empty if unknown."""
    place = ", ".join(filter(None, (operator, line)))
    return TraceError(
        "Expected a deterministic forward, got one that draws random numbers"
        f"{f' ({place})' if place else ''}: a document must have the same scores every time.",
        "Pass training=self.training to F.dropout, or use nn.Dropout."
        if "dropout" in operator
        else "Draw them only if self.training; or draw them once, in __init__, and keep them by "
        "register_buffer.",
    )


def drawing_node(program: torch.export.ExportedProgram) -> fx.Node | None:
    """Return the first node of a captured program that draws random numbers; None without one."""
    return next((node for node in program.graph.nodes if draws(node)), None)


def draws(node: fx.Node) -> bool:
    """Return whether a captured node draws random numbers."""
    target = node.target
    if not isinstance(target, OpOverload) or not _may_draw(target):
        return False
    names = [argument.name for argument in target._schema.arguments]
    values: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    for argument in target._schema.arguments:
        value = values.get(argument.name, argument.default_value)
        if argument.name in _SWITCHES and value is False:
            return False
        if argument.name in _SHARES and value == 0:
            return False
    return True


def error_of_node(node: fx.Node) -> TraceError:
    """Return the error for a program with a node that draws."""
    return drawing_error(str(node.target).rpartition(".")[0], last_own_line(node.meta))


def error_of_failure(error: BaseException) -> TraceError | None:
    """Return the error for a model whose capture failed in an operator that draws; else None."""
    while error.__cause__ is not None:
        error = error.__cause__
    line, operator = "", None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_the_users(frame):
            line, operator = line_of(frame, number), None
        called = frame.f_locals.get("func")
        operator = called if isinstance(called, OpOverload) else operator
    if operator is None or not _may_draw(operator):
        return None
    if any(a.name in (*_SWITCHES, *_SHARES) for a in operator._schema.arguments):
        return None  # such as a GRU, which draws only for its dropout
    return drawing_error(str(operator).rpartition(".")[0], line)


def _may_draw(operator: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags
