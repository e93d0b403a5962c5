"""Suppression of the logs and warnings that torch writes beside its errors."""

import io
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

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
