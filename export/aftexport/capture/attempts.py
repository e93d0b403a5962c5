"""The ways to have ``torch.export`` capture a model, tried in turn."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config

from aftexport.capture.complaints import failed_in_torch, violation
from aftexport.capture.shape_guards import ShapeGuard, record_shape_guards
from aftexport.capture.size_arithmetic import free_sizes_in_math
from aftexport.capture.torch_logs import quiet
from aftexport.contract import AXES

_MAX_BATCH = 1 << 16


@dataclass(frozen=True)
class Failure:
    """Why torch.export did not capture a model, and what it took for given of its sizes."""

    error: Exception
    sizes: list[ShapeGuard]


@dataclass(frozen=True)
class _Attempt:
    """A way to have torch capture a model.

    Attributes:
        may_be_one: a size that is not 1 in the example, as of ``x[:, ::2]``, is taken never to be,
            which a short document's is; told otherwise, torch goes the way that does for 1 too.
        decide: see ``record_shape_guards``.
        strict: read the forward's code rather than run it, so that ``int(tokens * 0.5)`` stays
            free.
    """

    may_be_one: bool
    decide: bool
    strict: bool


_ATTEMPTS = (
    _Attempt(may_be_one=False, decide=False, strict=False),
    _Attempt(may_be_one=True, decide=False, strict=False),
    _Attempt(may_be_one=True, decide=True, strict=False),
    _Attempt(may_be_one=True, decide=True, strict=True),
)


def attempt_export(
    model: nn.Module, names: Sequence[str], limit: int
) -> ExportedProgram | list[Failure]:
    """Captures a model as often as it takes.

    Args:
        model: in evaluation mode, with plain inputs.
        names: the names of its inputs.
        limit: most tokens of a document.

    Returns:
        The program, or the failure of each attempt, of which the last says most.
    """
    dims: dict[str, Any] = {
        "batch": Dim("batch", min=1, max=_MAX_BATCH),
        "tokens": Dim("tokens", min=1, max=limit) if limit > 1 else 1,
    }
    shapes = {n: {axis: dims[d] for axis, d in AXES[n].items()} for n in names}
    # A batch or a length of 1 in the example would be taken for a constant.
    arguments = tuple(examples(names, min(16, limit)).values())
    failures: list[Failure] = []
    # Of at most 2 tokens, a size that is never 1 is always 2.
    for attempt in _ATTEMPTS[limit == 2 :]:
        if attempt.strict and not any(t.is_of_the_model for f in failures for t in f.sizes):
            break
        outcome = _run(attempt, model, arguments, shapes)
        if isinstance(outcome, ExportedProgram):
            return outcome
        of_sizes = violation(str(outcome.error)) is not None
        if not failures or (of_sizes and not attempt.strict):
            failures.append(outcome)
        if not of_sizes and not failed_in_torch(outcome.error):
            break
    return failures


def _run(
    attempt: _Attempt, model: nn.Module, arguments: tuple[Tensor, ...], shapes: dict[str, Any]
) -> ExportedProgram | Failure:
    # With functions of math that give tensors, unless one of these is asked for its value.
    for has_math in (False,) if attempt.strict else (True, False):
        sizes: list[ShapeGuard] = []
        free: AbstractContextManager[list[str]] = (
            free_sizes_in_math(model) if has_math else nullcontext([])
        )
        options: Any = _config.patch(backed_size_oblivious=attempt.may_be_one)  # type: ignore[attr-defined]
        noting = record_shape_guards(sizes, decide=attempt.decide)
        with options, quiet(), torch.no_grad(), free as tensors, noting:
            try:
                return torch.export.export(
                    model, arguments, dynamic_shapes=shapes, strict=attempt.strict
                )
            except Exception as error:  # torch raises anything
                failure = Failure(error, sizes)
        if not tensors or violation(str(failure.error)) is not None:
            break
    return failure


def examples(names: Iterable[str], tokens: int) -> dict[str, Tensor]:
    """Two documents of ``tokens`` tokens, as the inputs that are named."""
    inputs = {
        "input_ids": torch.zeros(2, tokens, dtype=torch.int64),
        "lengths": torch.full((2,), tokens, dtype=torch.int64),
    }
    return {name: inputs[name] for name in names}
