"""Why torch.export does not capture a model, as one error with one remedy."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.export import ExportedProgram

from aftexport.capture.advice import BRANCHES, IN_TORCH, ONE_WAY, decisive, is_of_pieces, remedy
from aftexport.capture.attempts import Failure, attempt_export, examples
from aftexport.capture.complaints import cause, failed_in_torch, learned_length, violation
from aftexport.capture.random_operators import error_of_failure
from aftexport.capture.shape_guards import ShapeGuard
from aftexport.capture.torch_logs import quiet
from aftexport.errors import TraceError


def explain(
    model: nn.Module, names: Sequence[str], failures: Sequence[Failure], limit: int
) -> TraceError:
    """Return the error that tells the author of a model what keeps it from being captured.

    Args:
        model: the module, in evaluation mode and with plain inputs.
        names: the names of its inputs.
        failures: the failure of each attempt, of which the last says most.
        limit: the longest document that was asked for, in tokens.
    """
    first, *again = failures
    error, taken = failures[-1].error, decisive(first.sizes, *(f.sizes for f in again[-1:]))
    bound = _most_tokens(failures, limit)
    one_way = _one_way(model, names, taken, bound, limit)
    if one_way is not None and one_way == bound:
        return TraceError(
            f"The model computes documents of more than {bound} tokens in another way than "
            f"shorter ones{taken.place if taken else ''}.",
            f"{BRANCHES} {ONE_WAY.format(one_way)}",
        )
    return error_of_failure(error) or _refusal(model, names, error, taken, one_way)


def find_bound(
    model: nn.Module, names: Sequence[str], failures: Sequence[Failure], limit: int
) -> int | None:
    """Return the longest document that the model takes by its own tables; None if that is open.

    Args:
        model, names, failures, limit: as for ``explain``.
    """
    bound = _most_tokens(failures, limit)
    # The last length can be one more than the bound.
    if bound < limit and _takes(model, names, bound) and not _takes(model, names, bound + 2):
        return bound
    return None


def _most_tokens(failures: Sequence[Failure], limit: int) -> int:
    """The most tokens with which the model can be captured; ``limit`` where none is said."""
    first, *again = failures
    bounds = [learned_length(str(failures[-1].error))]
    bounds += [taken.most_tokens(limit) for failure in again for taken in failure.sizes]
    # Where sizes may be 1, a table's number of rows may go unsaid.
    bound = min((n for n in bounds if n is not None and n > 1), default=None)
    return min(bound or learned_length(str(first.error)) or limit, limit)


def _one_way(
    model: nn.Module, names: Sequence[str], taken: ShapeGuard | None, bound: int, limit: int
) -> int | None:
    """The most tokens up to which the model computes all in one way; None where it has no such.

    It was captured for these.
    """
    if taken is None or taken.conversion or is_of_pieces(taken):
        return None
    found = {bound, taken.step(limit) or limit} - {1, limit}
    works = (
        n for n in sorted(found) if isinstance(attempt_export(model, names, n), ExportedProgram)
    )
    return next(works, None)


def _refusal(
    model: nn.Module,
    names: Sequence[str],
    error: Exception,
    taken: ShapeGuard | None,
    one_way: int | None,
) -> TraceError:
    """The error that says why a model cannot be captured, and what to do."""
    problem = "torch.export cannot capture the model for every batch and length"
    if (said := violation(str(error))) is not None:
        said = f": {said}" if taken is None else f", only where {taken}{taken.place}"
        advice = remedy(model, str(error), taken, one_way)
        return TraceError(f"{problem}{said}.", advice)
    inputs = examples(names, 16)
    try:
        with torch.no_grad():
            model(*inputs.values())
    except Exception as own:  # a module of others raises anything
        given = " and ".join(f"{name} {list(x.shape)}" for name, x in inputs.items())
        return TraceError(
            f"The model's forward fails in PyTorch too, on {given}: {cause(own)}.",
            remedy(model, str(own), otherwise="Mend what fails there, or wrap the model."),
        )
    if failed_in_torch(error):
        place = taken.place if taken else ""
        problem = f"{problem}: torch fails at its sizes{place}, {cause(error)}."
        return TraceError(problem, IN_TORCH)
    return TraceError(f"{problem}: {cause(error)}.", remedy(model, str(error)))


def _takes(model: nn.Module, names: Sequence[str], tokens: int) -> bool:
    """Whether the model can be captured for two documents of that length; computes nothing."""
    try:
        with quiet(), torch.no_grad():
            torch.export.export(model, tuple(examples(names, tokens).values()))
    except Exception:  # whatever a table that is too short leads to
        return False
    return True
