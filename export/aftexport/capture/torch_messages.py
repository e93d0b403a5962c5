"""The errors and logs of torch: the reason in an error, and suppression of the output beside it."""

import io
import logging
import re
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from aftexport.capture.shape_guards import axis_names, is_the_users, line_of
from aftexport.errors import first_line


def violation(complaint: str) -> str | None:
    """Return the first axis that torch.export cannot keep free; None if it names none."""
    match = re.search(r"^Constraints violated.*\n\s*- (.+)$", complaint, re.MULTILINE)
    if match is None:
        return None
    # The rest of the line concerns mark_dynamic, which the user did not call, or a log.
    text = re.split(r" If you're using|Specializations unexpectedly", match[1])[0].rstrip(". ")
    return re.sub(r"(\w+) = \1\b", r"\1", axis_names(text))


def failed_in_torch(error: BaseException) -> bool:
    """Return whether an assertion inside torch failed, e.g. on slices of incomparable sizes."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("torch.")
    return isinstance(error, AssertionError) and inside


def learned_length(complaint: str) -> int | None:
    """Return the longest document that torch.export names, for a model that slices tables."""
    bounds = [int(n) for n in re.findall(r"tokens = Dim\('tokens', max=(\d+)\)", complaint)]
    # torch treats a slice of the whole table as a separate branch, so the length that it names is
    # one beyond the bound. For a table [1, rows, D] it counts numbers, D per row.
    bounds += [
        int(whole) // int(each or 1) - int(more or 0) - 1
        for more, each, whole in re.findall(
            r"(?:\((\d+) \+ |\((\d+)\*)?L\['input_ids'\]\.size\(\)\[1\]\)? != (\d+)", complaint
        )
    ]
    return min(bounds, default=0) if min(bounds, default=0) > 1 else None


def cause(error: BaseException) -> str:
    """Return the type and text of the innermost cause, with the user's line that led to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    kind, words = type(error).__name__, first_line(error)
    text = kind if words == kind else f"{kind}: {words}".rstrip(".")
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_the_users(frame):
            return f"{text} ({line_of(frame, line)})"
    return text


_LIBRARIES = ("torch", "onnxscript", "onnx_ir")
_LOCK = threading.RLock()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the output of torch beside its errors from the user.

    This output is deprecation notes, warnings of a missing torchvision, and tracebacks and graphs
    of a failed attempt, whose error holds the same information.
    """
    with _LOCK:  # loggers are shared by the whole process
        known = [n for n in logging.root.manager.loggerDict if n.partition(".")[0] in _LIBRARIES]
        loggers = [logging.getLogger(name) for name in {*known, *_LIBRARIES}]
        before = [logger.disabled for logger in loggers]
        # A module imported in the block may add a logger, whose records reach these handlers.
        silenced = [(handler, _Silence()) for logger in loggers for handler in logger.handlers]
        for logger in loggers:
            logger.disabled = True
        for handler, silence in silenced:
            handler.addFilter(silence)
        try:
            # torch prints the graph of an attempt that fails.
            with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
        finally:
            for handler, silence in silenced:
                handler.removeFilter(silence)
            for logger, disabled in zip(loggers, before, strict=True):
                logger.disabled = disabled


class _Silence(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record comes from another library."""
        return record.name.partition(".")[0] not in _LIBRARIES
