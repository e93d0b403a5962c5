"""Failures of torch.export to capture a model, each as one error with one remedy."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.export import ExportedProgram

from aftexport.capture.advice import (
    BRANCHES,
    IN_TORCH,
    ONE_WAY,
    decisive_guard,
    is_of_pieces,
    remedy,
)
from aftexport.capture.attempts import Failure, attempt_export
from aftexport.capture.complaints import cause, failed_in_torch, learned_length, violation
from aftexport.capture.model_inputs import ModelInputs
from aftexport.capture.random_operators import error_of_failure
from aftexport.capture.shape_guards import ShapeGuard
from aftexport.capture.torch_logs import quiet
from aftexport.errors import TraceError


class OneWayError(TraceError):
    """A model that torch.export captures up to a length, where it takes one branch only.

    Attributes:
        max_tokens: the length.
        without_length: the same error, whose remedy does not name the length.
    """

    def __init__(self, problem: str, remedy: str, max_tokens: int) -> None:
        super().__init__(problem, f"{remedy} {ONE_WAY.format(max_tokens)}")
        self.max_tokens = max_tokens
        self.without_length = TraceError(problem, remedy)


def explain(
    model: nn.Module, inputs: ModelInputs, failures: Sequence[Failure], limit: int
) -> TraceError:
    """Return the error that explains to the author of a model why it cannot be captured.

    Args:
        model: the module, in evaluation mode and with plain inputs.
        inputs: its inputs.
        failures: the failure of each attempt; the last one is the most specific.
        limit: the requested maximum length of a document, in tokens.
    """
    first, *again = failures
    error, guard = failures[-1].error, decisive_guard(first.guards, *(f.guards for f in again[-1:]))
    bound = _max_tokens(failures, limit)
    one_way = _one_way(model, inputs, guard, bound, limit)
    if one_way is not None and one_way == bound:
        guards = (g for f in failures for g in f.guards if g.max_tokens(limit) == bound)
        branch = next(guards, guard)
        return OneWayError(
            "Expected one computation for documents of every length, got a branch at "
            f"{bound} tokens{branch.place if branch else ''}.",
            BRANCHES,
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

    Args:
        prepare: returns a new copy of the module; a forward may change the one that it runs in.
        inputs, failures, limit: the arguments of ``explain``.
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
    if guard is None or guard.conversion or is_of_pieces(guard):
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
        return TraceError(problem, IN_TORCH)
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
