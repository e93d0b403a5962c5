"""Errors with a remedy for the user. The command line prints them without a traceback."""

from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class AftexportError(Exception):
    """A problem with its remedy.

    Args:
        problem: one sentence that names the file, tensor or option.
        remedy: one imperative sentence for the user.
    """

    exit_code = 2

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem} {remedy}")
        self.problem = problem
        self.remedy = remedy


class UsageError(AftexportError):
    """The options do not fit together, or do not fit the model."""


class _FileError(AftexportError):
    """The file or folder ``path`` cannot be used, for ``reason``."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        super().__init__(f"{path}: {reason}.", remedy)
        self.path = path
        self.reason = reason


class CheckpointError(_FileError):
    """A model file cannot be used."""


class BundleError(_FileError):
    """A bundle is damaged, incomplete, or newer than this version reads."""


class TraceError(AftexportError):
    """The model cannot be expressed as one ONNX graph for every length."""


class LibraryError(AftexportError):
    """An installed library lacks a part that aftexport uses."""


class EngineError(AftexportError):
    """A runtime refused the model or failed while running it."""


class StorageError(AftexportError):
    """There is not enough space for the values of a document in chunks between layers."""


class InputError(AftexportError):
    """A request or an input tensor does not fit the model's input specification."""


class ParityError(AftexportError):
    """The exported model differs from the trained one."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """Return the first nonempty line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic of a library in Rust, which is a BaseException, as a RuntimeError."""
    try:
        yield
    except (Exception, CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise RuntimeError(f"{type(panic).__name__}: {panic}") from panic
