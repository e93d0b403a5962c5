"""Failures of torch.export to capture a model, each as one error with one remedy."""

import re
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from aftexport.capture.attempts import Failure, attempt_export
from aftexport.capture.model_inputs import ModelInputs
from aftexport.capture.shape_guards import ShapeGuard, is_the_users, last_own_line, line_of
from aftexport.capture.torch_messages import (
    cause,
    failed_in_torch,
    learned_length,
    quiet,
    violation,
)
from aftexport.errors import TraceError
from aftexport.system.contract import FEATURES, IDS, MAX_TOKENS
from aftexport.system.internals.torch_operators import OpOverload


class OneWayError(TraceError):
    """A model that torch.export captures up to a length, where it takes one branch only.

    ``without_length`` is the same error, whose remedy does not name the length ``max_tokens``.
    """

    def __init__(self, problem: str, remedy: str, max_tokens: int) -> None:
        super().__init__(problem, f"{remedy} {_ONE_WAY.format(max_tokens)}")
        self.max_tokens = max_tokens
        self.without_length = TraceError(problem, remedy)


def explain(
    model: nn.Module, inputs: ModelInputs, failures: Sequence[Failure], limit: int
) -> TraceError:
    """Return the error that explains to the author of a model why it cannot be captured."""
    first, *again = failures
    error, guard = (
        failures[-1].error,
        _decisive_guard(first.guards, *(f.guards for f in again[-1:])),
    )
    bound = _max_tokens(failures, limit)
    one_way = _one_way(model, inputs, guard, bound, limit)
    if one_way is not None and one_way == bound:
        guards = (g for f in failures for g in f.guards if g.max_tokens(limit) == bound)
        branch = next(guards, guard)
        return OneWayError(
            "Expected one computation for documents of every length, got a branch at "
            f"{bound} tokens{branch.place if branch else ''}.",
            _BRANCHES,
            bound,
        )
    refusal = error_of_failure(error) or _refusal(model, inputs, error, guard, one_way)
    asked = next((question for failure in failures for question in failure.questions), None)
    if asked is None:
        return refusal
    # The branch for a capture may be another computation than the trained one.
    return TraceError(
        f"{refusal.problem} The forward asks {asked}, and the export has the branch that PyTorch "
        "runs, where the answer is no.",
        refusal.remedy,
    )


def find_bound(
    prepare: Callable[[], nn.Module], inputs: ModelInputs, failures: Sequence[Failure], limit: int
) -> int | None:
    """Return the maximum length that the model's own tables allow; None if it is unknown.

    ``prepare`` returns a new copy of the module, since a forward may change the one it runs in.
    """
    bound = _max_tokens(failures, limit)
    beyond = bound + 2  # the last length can be one more than the bound
    if bound >= limit or not _takes(prepare(), inputs, bound) or _takes(prepare(), inputs, beyond):
        return None
    # PyTorch may run a branch that torch.export cannot capture: the model then has no such limit.
    return None if _runs(prepare(), inputs, beyond) else bound


def _max_tokens(failures: Sequence[Failure], limit: int) -> int:
    """Return the maximum number of tokens that the failures report; ``limit`` without a report."""
    first, *again = failures
    bounds = [learned_length(str(failures[-1].error))]
    bounds += [guard.max_tokens(limit) for failure in again for guard in failure.guards]
    # An attempt in which sizes may be 1 may not report the number of rows of a table.
    bound = min((n for n in bounds if n is not None and n > 1), default=None)
    return min(bound or learned_length(str(first.error)) or limit, limit)


def _one_way(
    model: nn.Module, inputs: ModelInputs, guard: ShapeGuard | None, bound: int, limit: int
) -> int | None:
    """Return the maximum length up to which the model takes one branch only; None for none.

    The model was captured for this length.
    """
    if guard is None or guard.conversion or _is_of_pieces(guard):
        return None
    candidates = {bound, guard.step(limit) or limit} - {1, limit}
    captured = (
        n
        for n in sorted(candidates)
        if isinstance(attempt_export(model, inputs, n), ExportedProgram)
    )
    return next(captured, None)


def _refusal(
    model: nn.Module,
    inputs: ModelInputs,
    error: Exception,
    guard: ShapeGuard | None,
    one_way: int | None,
) -> TraceError:
    """Return the error for a model that cannot be captured, with its remedy."""
    problem = "torch.export cannot capture the model for every batch and length"
    advise = partial(remedy, model, has_features=inputs.num_features is not None)
    if (detail := violation(str(error))) is not None:
        detail = f": {detail}" if guard is None else f", only where {guard}{guard.place}"
        advice, takes_bound = advise(str(error), guard)
        if takes_bound and one_way is not None:
            return OneWayError(f"{problem}{detail}.", advice, one_way)
        return TraceError(f"{problem}{detail}.", advice)
    examples = inputs.examples(16)
    try:
        with torch.no_grad():
            model(*examples.values())
    except Exception as own:  # a module of a user can raise any exception
        shapes = " and ".join(f"{name} {list(x.shape)}" for name, x in examples.items())
        return TraceError(
            f"The model's forward also fails in PyTorch, on {shapes}: {cause(own)}.",
            advise(str(own), otherwise="Fix the error in forward, or wrap the model.")[0],
        )
    if failed_in_torch(error):
        place = guard.place if guard else ""
        problem = f"{problem}: torch itself fails on its sizes{place}, {cause(error)}."
        return TraceError(problem, _IN_TORCH)
    return TraceError(f"{problem}: {cause(error)}.", advise(str(error))[0])


def _runs(model: nn.Module, inputs: ModelInputs, tokens: int) -> bool:
    """Return whether PyTorch runs the model on two documents of ``tokens`` tokens."""
    try:
        with torch.no_grad():
            model(*inputs.examples(tokens).values())
    except Exception:  # a table that is too short can raise any exception
        return False
    return True


def _takes(model: nn.Module, inputs: ModelInputs, tokens: int) -> bool:
    """Return whether the model can be captured for two documents of ``tokens`` tokens."""
    try:
        with quiet(), torch.no_grad():
            torch.export.export(model, tuple(inputs.examples(tokens).values()))
    except Exception:  # a table that is too short can raise any exception
        return False
    return True


_RECURRENT = (
    "torch.export captures recurrent layers for one length only: replace them by attention layers."
)
_INSTEAD = {
    "conv1d": "Set its padding to 0 and pad the tokens before it by torch.nn.functional.pad, to at "
    "least the size of its kernel.",
    "max_pool1d": "Call max_pool2d on x.unsqueeze(2): torch.export captures it for every length.",
    "interpolate": "Write mode='area' as means of windows, by differences of cumsum: torch.export "
    "captures it for one size only.",
    "linspace": "Write torch.arange(tokens) / tokens: torch.export captures it for every length.",
    "lstm": _RECURRENT,
    "gru": _RECURRENT,
    "rnn_tanh": _RECURRENT,
    "rnn_relu": _RECURRENT,
}
"""Operator to its replacement, which torch.export captures for every length."""
_IN_TORCH = (
    "Slice in that line from the start or in other steps, pad the tokens before the slice, or "
    "write the line in other operators."
)
"""The advice for failures inside torch, see ``torch_messages.failed_in_torch``."""
_BRANCHES = "Remove branches on the number of tokens from forward."
_ONE_WAY = "Or export one branch only: --max-length {}."
_TABLE = "Give the table in that line one row for every token."
_PAGE = "docs/how-to/export-your-model.md, Windows"
_RECURRENCES = (
    "For linear attention in chunks, call aftexport.nn.functional.recurrent_linear_attention."
)
_WINDOWS = (
    "Pad the tokens to -(-tokens // w) windows of w tokens, without a branch: multiples of w get "
    f"no padding ({_PAGE}). {_RECURRENCES}"
)
_NUMBERS = {
    "float": "Write tokens ** 0.5, or torch.sym_float(tokens) in place of float(tokens): a Python "
    "float is fixed to one length.",
    "int": "Write the size in integers, tokens // 2 in place of int(tokens * 0.5): a Python int "
    "is fixed to one length.",
    "index": "Write the size in integers, with + - * // and min and max: a Python number is fixed "
    "to one length. math.sqrt(tokens) and math.log(tokens) may scale tensors.",
    "loop": "Replace loops over the tokens by cumsum, or by one operator on windows: both are "
    f"captured for every length ({_PAGE}). {_RECURRENCES}",
}
"""Conversion of a size to a Python number, see ``ShapeGuard.conversion``, to its replacement."""
_FLOAT = (
    "Give that operator a float that is the same for every length, and multiply a tensor by the "
    "float that depends on the length: for scaled_dot_product_attention the query, with scale=1.0."
)
_SCALE = "Give interpolate size=tokens in place of a scale_factor that depends on the length."
_PIECES = ("chunk", "split", "tensor_split", "unbind", "split_with_sizes")


def _is_of_pieces(guard: ShapeGuard) -> bool:
    """Return whether a guard fixes the number of pieces of a tensor, which varies with length."""
    return guard.operator.rpartition(".")[2] in _PIECES


def _decisive_guard(
    guards: Sequence[ShapeGuard], retry_guards: Sequence[ShapeGuard] = ()
) -> ShapeGuard | None:
    """Return the guard that keeps a model from being captured; None without any guard.

    A guard in one attempt only comes from the branch that torch was told to take, except for a
    branch of the model itself. The same condition may be written differently in both attempts.

    In the attempt of ``guards`` sizes are never 1, and in that of ``retry_guards`` they may be 1.
    """
    if not retry_guards:
        return next(iter([g for g in guards if _restricts(g)] or guards), None)
    restricting = [g for g in retry_guards if _restricts(g)]
    before = {(str(g), g.operator, g.line) for g in guards}
    kept = [g for g in restricting if (str(g), g.operator, g.line) in before]
    own = [g for g in restricting if not g.operator]
    return next(iter(kept or own or restricting or retry_guards))


def _restricts(guard: ShapeGuard) -> bool:
    return guard.excludes("batch") or guard.excludes("tokens")


def remedy(
    model: nn.Module,
    complaint: str,
    guard: ShapeGuard | None = None,  # the one of ``_decisive_guard``
    *,
    has_features: bool = False,
    # The advice for unknown complaints.
    otherwise: str = "Write it in other operators; branches on values, .item() and .tolist() "
    "cannot be captured.",
) -> tuple[str, bool]:
    """Return the imperative advice for one failure, and whether a maximum length helps too."""
    if (
        advice := _advice_on_module(model, complaint, guard, has_features=has_features)
    ) is not None:
        return advice, False
    if guard is not None and (found := _advice_on_guard(guard)) is not None:
        return found
    if violation(complaint) is not None:
        return "Remove branches on shapes from forward.", True
    return otherwise, False


def _advice_on_module(
    model: nn.Module, complaint: str, guard: ShapeGuard | None, *, has_features: bool
) -> str | None:
    """Return the advice for a failure at any length; None for one that depends on the length."""
    if not has_features and not any(isinstance(module, nn.Embedding) for module in model.modules()):
        return (
            "Add --features N for a module that takes N features of each token. For token ids, put "
            "an nn.Embedding before the module. Or export the module by torch.onnx.export, and run "
            "aftexport fuse."
        )
    if "data is not allocated" in complaint:
        return (
            "Write the reads of single parameter values as tensor operations. For aft-pytorch's "
            "AFTLocal, which rebuilds wbias in every call, use AFTFull's forward with "
            "self.wbias * band: aftexport recognizes AFT-local in it."
        )
    if "in output, which is not a known type" in complaint:
        return (
            "Wrap it in a module that returns one tensor, or a dict or NamedTuple of tensors by "
            "name."
        )
    if guard is not None and guard.excludes("batch"):
        return (
            f"Read the number of documents from {FEATURES if has_features else IDS}.shape, and "
            "remove loops over documents from forward."
        )
    if re.search(r"'SymInt' object has no attribute|of type Sym(Int|Float)", complaint):
        return "Write tokens ** 0.5, or math.log(tokens): NumPy does not accept dynamic sizes."
    return None


def _advice_on_guard(guard: ShapeGuard) -> tuple[str, bool] | None:
    """Return the advice for a guard on the tokens, and whether a maximum length helps too.

    None stands for a guard of unknown origin.
    """
    if guard.conversion:
        return _NUMBERS[guard.conversion], False
    if guard.operator and guard.max_tokens(MAX_TOKENS) is not None:
        return (_WINDOWS, False) if _is_of_pieces(guard) else (_TABLE, True)
    if guard.operator and guard.is_of_floats:
        return (_SCALE if guard.operator.endswith(".interpolate") else _FLOAT), False
    if guard.operator:
        advice = _INSTEAD.get(
            guard.operator.rpartition(".")[2],
            "Write that line so that it works for every length from 1 token: pad the tokens to the "
            f"minimum it needs, or to a multiple ({_PAGE}).",
        )
        return advice, False
    return (_WINDOWS, False) if guard.is_of_multiples else None


_SWITCHES = ("train", "training")
"""Arguments whose value False switches drawing off."""
_SHARES = ("dropout", "dropout_p")
"""Arguments whose value 0 switches drawing off."""


def drawing_error(operator: str, line: str) -> TraceError:
    """Return the error for a model that draws random numbers; unknown parts are empty."""
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
