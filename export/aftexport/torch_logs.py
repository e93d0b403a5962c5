"""What torch logs beside its errors."""

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARIES = ("torch", "onnxscript", "onnx_ir")
_LOCK = threading.RLock()


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps from the user what torch says beside its errors.

    Deprecation notes, warnings of a missing torchvision, and tracebacks that it logs of an attempt
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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            for handler, silence in silenced:
                handler.removeFilter(silence)
            for logger, disabled in zip(loggers, before, strict=True):
                logger.disabled = disabled


class _Silence(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps back every record."""
        return False
