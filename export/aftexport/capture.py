"""From a PyTorch module to a program captured for every batch and length.

``torch.export`` raises where a model branches on a shape that ``torch.onnx.export`` would
silently freeze.
"""

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from aftexport.errors import TraceError
from aftexport.export_attempts import Failure, attempt_export, examples
from aftexport.forward_signature import ForwardSignature, with_plain_inputs
from aftexport.manifest import MAX_TOKENS
from aftexport.random_operators import error_of_failure
from aftexport.refusals import (
    BRANCHES,
    IN_TORCH,
    ONE_WAY,
    cause,
    decisive,
    failed_in_torch,
    first_line,
    is_of_pieces,
    learned_length,
    remedy,
    violation,
)
from aftexport.sizes import Taken
from aftexport.torch_logs import quiet
from aftexport.torch_script import scripted_parts


def capture(
    model: nn.Module, *, dtype: torch.dtype = torch.float32, max_tokens: int | None = None
) -> ExportedProgram:
    """Captures a module whose ``forward`` takes ``input_ids`` and, if it likes, ``lengths``.

    Args:
        model: left as it is; a copy is put in evaluation mode, cast and folded.
        dtype: floating-point type of the exported parameters.
        max_tokens: most tokens of a document, None for ``MAX_TOKENS``. Where the model takes
            fewer, and torch.export says how many, it is captured for those.

    Raises:
        TraceError: where the forward signature differs, or the model cannot be
            captured for every batch and length.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise _scripted("The model is")
    names = ForwardSignature.of(model.forward).inputs
    model = prepared(model, dtype)
    limit = max_tokens or MAX_TOKENS
    captured = attempt_export(model, names, limit)
    if isinstance(captured, ExportedProgram):
        return captured
    if parts := scripted_parts(model):
        raise _scripted(f"{', '.join(parts)} in the model is") from captured[-1].error
    bound = _most_tokens(captured, limit)
    # The last length can be one more than the bound.
    if bound < limit and _takes(model, names, bound) and not _takes(model, names, bound + 2):
        return capture(model, dtype=dtype, max_tokens=bound)
    first, *again = captured
    error, taken = captured[-1].error, decisive(first.sizes, *(f.sizes for f in again[-1:]))
    one_way = _one_way(model, names, taken, bound, limit)
    if one_way is not None and one_way == bound:
        raise TraceError(
            f"The model computes documents of more than {bound} tokens in another way than "
            f"shorter ones{taken.place if taken else ''}.",
            f"{BRANCHES} {ONE_WAY.format(one_way)}",
        ) from error
    raise error_of_failure(error) or _refusal(model, names, error, taken, one_way) from error


def _scripted(whole: str) -> TraceError:
    return TraceError(
        f"{whole} in TorchScript, whose code torch.export does not see.",
        "Build it without torch.jit.script and torch.jit.trace, and load the same weights.",
    )


def prepared(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a module as it is captured: in evaluation mode, cast, folded, with plain inputs."""
    model = with_plain_inputs(copied(model).eval().to(dtype))
    for module in model.modules():
        if callable(fold := getattr(module, "fold", None)):
            fold()
    return model


def _most_tokens(failures: Sequence[Failure], limit: int) -> int:
    """The most tokens with which the model can be captured; ``limit`` where none is said."""
    first, *again = failures
    bounds = [learned_length(str(failures[-1].error))]
    bounds += [taken.most_tokens(limit) for failure in again for taken in failure.sizes]
    # Where sizes may be 1, a table's number of rows may go unsaid.
    bound = min((n for n in bounds if n is not None and n > 1), default=None)
    return min(bound or learned_length(str(first.error)) or limit, limit)


def _one_way(
    model: nn.Module, names: Sequence[str], taken: Taken | None, bound: int, limit: int
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
    taken: Taken | None,
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


def _takes(model: nn.Module, names: Iterable[str], tokens: int) -> bool:
    """Whether the model can be captured for two documents of that length; computes nothing."""
    try:
        with quiet(), torch.no_grad():
            torch.export.export(model, tuple(examples(names, tokens).values()))
    except Exception:  # whatever a table that is too short leads to
        return False
    return True


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module, with weights of its own.

    Raises:
        TraceError: where the module holds something that cannot be copied.
    """
    held = (
        value
        for part in module.modules()
        for value in (*vars(part).values(), *part.buffers(recurse=False))
    )
    # What was computed from weights, as weight_norm holds it, autograd does not let be copied.
    results = {id(v): v.detach().clone() for v in held if isinstance(v, Tensor) and not v.is_leaf}
    try:
        return copy.deepcopy(module, results)
    except Exception as error:  # a module of others holds anything
        raise TraceError(
            f"The module cannot be copied: {first_line(error)}",
            "Take what it names out of the module's attributes.",
        ) from error
