"""Log formats for people and for machines, and output that never waits for its readers."""

import atexit
import io
import json
import logging
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from aftexport.system.console import one_line

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger("aftserve.output_queue")

ADDRESS_LOGGER = "aftserve.address"
"""Logger of the line with the server's addresses, which programs read to find the port."""
_OWN_LOGGERS = ("aftserve", "aftexport", "uvicorn")
_MAX_QUEUED_BYTES = 1 << 17
_MAX_WRITE_BYTES = 1 << 16
_FLUSH_SECONDS = 1.0
_NAMES = {"stdout": "standard output", "stderr": "standard error"}


def configure_logging(form: str, level: str = "info") -> None:
    """Send every log record of this level or above to standard error, one line each.

    The addresses of the server are written at every level.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    number = logging.getLevelNamesMapping()[level.upper()]
    # Other libraries would fill the log at debug, which is for the server's own loggers.
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(number)
    logging.getLogger(ADDRESS_LOGGER).setLevel(logging.INFO)
    # The access log has a line for each request, with its name and times.
    logging.getLogger("uvicorn.access").disabled = True


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return one_line(super().formatMessage(record) + fields)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


class _OutputQueue(io.RawIOBase):
    """A stream whose bytes a daemon thread writes to a file descriptor.

    A write that does not fit into the queue beside others is dropped as a whole.
    """

    # descriptor: of a pipe, a terminal, a socket or a file

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__()
        self.dropped_lines = 0  # also those that could not be written
        self._descriptor = descriptor
        self._name = name
        self._changed = threading.Condition()
        self._parts = deque[bytes]()
        self._queued_bytes = 0
        self._unreported_lines = 0
        self._has_failed = False
        threading.Thread(target=self._run, name=f"{name} writer", daemon=True).start()

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the file descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: "ReadableBuffer", /) -> int:
        """Queue bytes, or drop them; never wait."""
        part = bytes(data)
        with self._changed:
            if self._queued_bytes and self._queued_bytes + len(part) > _MAX_QUEUED_BYTES:
                lines = part.count(b"\n")
                self.dropped_lines += lines
                self._unreported_lines += lines
            else:
                self._parts.append(part)
                self._queued_bytes += len(part)
                self._changed.notify_all()
        return len(part)

    def wait_until_empty(self, seconds: float) -> None:
        """Wait until everything is written, for at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued_bytes, max(0.0, seconds))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._parts)
                part = memoryview(b"".join(self._parts))
                self._parts.clear()
            while part:
                part = part[self._write_some(part) :]

    def _write_some(self, part: memoryview) -> int:
        """Write the beginning of a part, or give up the part; return the number of bytes done."""
        lost_lines = 0
        try:
            try:
                done = os.write(self._descriptor, part[:_MAX_WRITE_BYTES])
            except BlockingIOError:
                select.select((), (self._descriptor,), ())
                return 0
        except OSError as error:
            done, lost_lines = len(part), bytes(part).count(b"\n")
            self._report_failure(error)
        self._report_dropped(done)
        with self._changed:
            self.dropped_lines += lost_lines
            self._queued_bytes -= done
            self._changed.notify_all()
        return done

    def _report_failure(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            reason = error.strerror
            logger.warning("%s cannot be written (%s); its text is lost", self._name, reason)

    def _report_dropped(self, done: int) -> None:
        """Log the number of dropped lines, once the queue holds only the ``done`` bytes."""
        with self._changed:
            if self._queued_bytes > done or not self._unreported_lines:
                return
            lines, self._unreported_lines = self._unreported_lines, 0
        logger.warning("%d lines of %s were dropped, as it was not read", lines, self._name)


_queues: list[_OutputQueue] = []


def unblock_output() -> None:
    """Write the standard streams of this process by threads from now on.

    Python's own writes are queued. Writes of native code and of child processes fail if a pipe or
    a terminal is full. Streams that were replaced before stay as they are.
    """
    _fill_closed_descriptors()
    for attribute, name in _NAMES.items():
        stream = getattr(sys, attribute)
        if stream is None or stream is not getattr(sys, f"__{attribute}__"):
            continue
        descriptor = stream.fileno()
        _reopen_without_blocking(descriptor)
        queue = _OutputQueue(descriptor, name)
        _queues.append(queue)
        text = io.TextIOWrapper(
            queue,  # type: ignore[type-var]
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
        )
        setattr(sys, attribute, text)
    atexit.register(flush_output)


def flush_output() -> None:
    """Wait until the queues are written, for a second at most."""
    end = time.monotonic() + _FLUSH_SECONDS
    for queue in _queues:
        queue.wait_until_empty(end - time.monotonic())


def dropped_lines() -> int:
    """Return the number of lines of both streams that were not written."""
    return sum(queue.dropped_lines for queue in _queues)


def _fill_closed_descriptors() -> None:
    """Open the null device in place of closed standard streams.

    Otherwise a client's connection may get the descriptor, and receive the output of native code.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def _reopen_without_blocking(descriptor: int) -> None:
    """Make writes to a pipe or a terminal fail if it is full.

    The flag belongs to an open file description, which other processes share, so open a new one.
    """
    if not (stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
        return
    try:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        reopened = os.open(f"/proc/self/fd/{descriptor}", flags)
    except (AttributeError, OSError):  # Windows; no /proc; a pipe of another user
        return
    os.dup2(reopened, descriptor)
    os.close(reopened)
