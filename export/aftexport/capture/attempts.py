"""Attempts to capture a model by ``torch.export``, in a fixed order."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from aftexport.capture.complaints import failed_in_torch, violation
from aftexport.capture.model_inputs import ModelInputs
from aftexport.capture.module_translations.replaced_functions import translate_functions
from aftexport.capture.shape_guards import ShapeGuard, record_shape_guards
from aftexport.capture.size_arithmetic import free_sizes_in_math
from aftexport.capture.torch_logs import quiet
from aftexport.capture.tracing_questions import answered_as_in_pytorch
from aftexport.system.internals.torch_shapes import allow_sizes_of_one

_MAX_BATCH = 1 << 16


@dataclass(frozen=True)
class Failure:
    """The error of an attempt to capture a model.

    Attributes:
        guards: the guards that torch set on the model's sizes.
        questions: the questions of the model whether it is captured, which got the answer no.
    """

    error: Exception
    guards: list[ShapeGuard]
    questions: list[str]


@dataclass(frozen=True)
class _Attempt:
    """The options of one call of torch.export.

    Attributes:
        may_be_one: whether torch takes branches that also hold for sizes of 1. By default it
            assumes that a size above 1 in the example, as in ``x[:, ::2]``, is never 1; short
            documents break this assumption.
        decide: the option of ``record_shape_guards``.
        strict: whether torch reads the code of the forward instead of running it, which keeps
            ``int(tokens * 0.5)`` dynamic.
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
    model: nn.Module, inputs: ModelInputs, limit: int
) -> ExportedProgram | list[Failure]:
    """Capture a model by the first attempt that succeeds.

    Args:
        model: the module, in evaluation mode and with plain inputs.
        inputs: its inputs.
        limit: the maximum length of a document in tokens.

    Returns:
        The program, or the failure of each attempt; the last one is the most specific.
    """
    dims: dict[str, Any] = {
        "batch": Dim("batch", min=1, max=_MAX_BATCH),
        "tokens": Dim("tokens", min=1, max=limit) if limit > 1 else 1,
    }
    shapes = {n: {axis: dims[d] for axis, d in axes.items()} for n, axes in inputs.axes.items()}
    # torch would treat a batch or a length of 1 in the example as a constant.
    arguments = tuple(inputs.examples(min(16, limit)).values())
    failures: list[Failure] = []
    # With at most 2 tokens, a size that is never 1 is always 2.
    for attempt in _ATTEMPTS[limit == 2 :]:
        if attempt.strict and not _can_be_strict(model, arguments, failures):
            break
        outcome = _run(attempt, model, arguments, shapes)
        if isinstance(outcome, ExportedProgram):
            return outcome
        is_of_sizes = violation(str(outcome.error)) is not None
        if not failures or (is_of_sizes and not attempt.strict):
            failures.append(outcome)
        if not is_of_sizes and not failed_in_torch(outcome.error):
            break
    return failures


def _can_be_strict(
    model: nn.Module, arguments: tuple[Tensor, ...], failures: Sequence[Failure]
) -> bool:
    """Return whether reading the code of the forward may help, and takes the branch of PyTorch."""
    if not any(guard.is_of_the_model for failure in failures for guard in failure.guards):
        return False
    # torch answers questions itself where it reads the code, so ask them in an ordinary run.
    with answered_as_in_pytorch() as asked, torch.no_grad(), suppress(Exception):
        model(*arguments)
    return not asked


def _run(
    attempt: _Attempt, model: nn.Module, arguments: tuple[Tensor, ...], shapes: dict[str, Any]
) -> ExportedProgram | Failure:
    # Functions of math return tensors first. The second run is without them, for models that
    # convert one of these tensors to a Python number.
    for has_math in (False,) if attempt.strict else (True, False):
        guards: list[ShapeGuard] = []
        free: AbstractContextManager[list[str]] = (
            free_sizes_in_math(model) if has_math else nullcontext([])
        )
        options = allow_sizes_of_one(attempt.may_be_one)
        recording = record_shape_guards(guards, decide=attempt.decide)
        translated = translate_functions(model)
        with (
            options,
            quiet(),
            torch.no_grad(),
            free as tensors,
            recording,
            translated,
            answered_as_in_pytorch() as asked,
        ):
            try:
                return torch.export.export(
                    model, arguments, dynamic_shapes=shapes, strict=attempt.strict
                )
            except Exception as error:  # torch raises exceptions of many types
                failure = Failure(error, guards, asked)
        if not tensors or violation(str(failure.error)) is not None:
            break
    return failure
