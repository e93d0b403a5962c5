"""What torch logs beside its errors."""

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
    """Keeps from the user what torch says beside its errors.

    Deprecation notes, warnings of a missing torchvision, and tracebacks and graphs of an attempt
    that fails, whose error says the same.
    """
    with _LOCK:  # loggers are those of the process
        known = [n for n in logging.root.manager.loggerDict if n.partition(".")[0] in _LIBRARIES]
        loggers = [logging.getLogger(name) for name in {*known, *_LIBRARIES}]
        before = [logger.disabled for logger in loggers]
        # What is imported meanwhile may add a logger, whose records go through one of these.
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
        """Keeps back the records of these libraries."""
        return record.name.partition(".")[0] not in _LIBRARIES
