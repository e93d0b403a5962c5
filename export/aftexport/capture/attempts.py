"""Attempts to capture a model by ``torch.export``, in a fixed order."""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from aftexport.capture.model_inputs import ModelInputs
from aftexport.capture.module_translations import translate_functions
from aftexport.capture.shape_guards import ShapeGuard, is_the_users, line_of, record_shape_guards
from aftexport.capture.torch_messages import failed_in_torch, quiet, violation
from aftexport.system.internals.torch_operators import tracing_questions
from aftexport.system.internals.torch_shapes import allow_sizes_of_one

_MAX_BATCH = 1 << 16


@dataclass(frozen=True)
class Failure:
    """The error of an attempt to capture a model."""

    error: Exception
    guards: list[ShapeGuard]
    questions: list[str]  # questions of the model whether it is captured, which got the answer no


@dataclass(frozen=True)
class _Attempt:
    """The options of one call of torch.export."""

    # Whether torch takes branches that also hold for sizes of 1. By default it assumes that a
    # size above 1 in the example, as in ``x[:, ::2]``, is never 1; short documents break this
    # assumption.
    may_be_one: bool
    decide: bool  # the option of ``record_shape_guards``
    # Whether torch reads the code of the forward instead of running it, which keeps ``int(tokens
    # * 0.5)`` dynamic.
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

    Otherwise return the failure of each attempt; the last one is the most specific.
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
    with _answered_as_in_pytorch() as asked, torch.no_grad(), suppress(Exception):
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
            _free_sizes_in_math(model) if has_math else nullcontext([])
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
            _answered_as_in_pytorch() as asked,
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


# A forward may compute something else while it is captured. The export must have the branch that
# PyTorch runs, so the code of a model gets the answer no to the question whether it is captured.
_LIBRARY = "transformers"
"""A library whose captured branch is the general one: it keeps every mask, whatever its values."""
_LOCK = threading.RLock()


@contextmanager
def _answered_as_in_pytorch() -> Iterator[list[str]]:
    """Let a model's own code find that it is not captured, in this thread, during the block.

    The yielded list receives each question, with the line that asked it.
    """
    thread, asked = threading.get_ident(), list[str]()

    def asking(own: Callable[[], bool], name: str) -> Callable[[], bool]:
        def answer() -> bool:
            if threading.get_ident() != thread or not (line := _line_of_model()):
                return own()
            asked.append(f"{name}() ({line})")
            return False

        return answer

    with _LOCK:  # torch is shared by the whole process
        changed = [(question, question.__code__) for question in tracing_questions()]
        for question, code in changed:
            # A new body, not a new function: the model may have imported the function by name.
            own = FunctionType(code, question.__globals__)
            name = f"{question.__module__}.{question.__name__}"
            question.__defaults__ = (asking(own, name),)
            question.__code__ = _asked.__code__
        try:
            yield asked
        finally:
            for question, code in changed:
                question.__code__, question.__defaults__ = code, None


def _asked(answer: Callable[[], bool]) -> bool:
    return answer()


def _line_of_model() -> str:
    """Return the line of the model that asks; empty if a library asks for itself."""
    frame: FrameType | None = sys._getframe(2)
    # torch and transformers have functions that hand the question on.
    while frame is not None and _package(frame) in ("torch", _LIBRARY) and _is_question(frame):
        frame = frame.f_back
    if frame is None or not is_the_users(frame) or _package(frame) == _LIBRARY:
        return ""
    return line_of(frame, frame.f_lineno)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_question(frame: FrameType) -> bool:
    return frame.f_code.co_name.startswith("is_") or frame.f_code is _asked.__code__


@contextmanager
def _free_sizes_in_math(model: nn.Module) -> Iterator[list[str]]:
    """Let the functions of ``_SYMBOLIC`` accept dynamic sizes, in this thread.

    A root is a symbolic number, whose whole part can be a size. The other results are tensors
    ``[]`` of the default type, because sympy has no symbols for them.

    The yielded list receives the name of each function whose result became a tensor.
    """
    thread, used = threading.get_ident(), list[str]()

    def wrap(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def called(*numbers: Any) -> Any:
            if threading.get_ident() != thread or not any(map(_is_free, numbers)):
                return own(*numbers)
            result = _SYMBOLIC[name](*numbers)
            if isinstance(result, torch.Tensor):
                used.append(name)
            return result

        return called

    with _LOCK:  # the module math is shared by the whole process
        wrapped = {getattr(math, name): wrap(name, getattr(math, name)) for name in _SYMBOLIC}
        places = [
            (space, name, value)
            for space in (vars(math), *_globals(model))
            for name, value in space.items()
            if isinstance(value, BuiltinFunctionType) and value in wrapped
        ]
        for space, name, value in places:
            space[name] = wrapped[value]
        try:
            yield used
        finally:
            for space, name, value in places:
                space[name] = value


def _globals(model: nn.Module) -> list[dict[str, Any]]:
    """Return the globals of the Python modules that define the forwards."""
    classes = {type(module) for module in model.modules()}
    names = {cls.__module__ for cls in classes if not issubclass(cls, torch.jit.ScriptModule)}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]


def _is_free(number: Any) -> bool:
    return isinstance(number, torch.SymInt | torch.SymFloat | torch.Tensor)


def _tensor(number: Any) -> Any:
    if isinstance(number, torch.Tensor):
        return number
    return torch.scalar_tensor(number, dtype=torch.get_default_dtype())


def _root(number: Any) -> Any:
    return number.sqrt() if isinstance(number, torch.Tensor) else number**0.5


def _logarithm(number: Any, base: Any = None) -> Any:
    natural = _tensor(number).log()
    return natural if base is None else natural / _tensor(base).log()


_SYMBOLIC: dict[str, Callable[..., Any]] = {
    "sqrt": _root,
    "pow": lambda base, exponent: base**exponent,
    "log": _logarithm,
    "log2": lambda number: _tensor(number).log2(),
    "log10": lambda number: _tensor(number).log10(),
    "log1p": lambda number: _tensor(number).log1p(),
    "exp": lambda number: _tensor(number).exp(),
    "tanh": lambda number: _tensor(number).tanh(),
}
