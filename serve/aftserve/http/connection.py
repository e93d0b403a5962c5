"""A client's connection, with limits on the bytes and the time before a request is complete.

A few bytes can take long to parse before an API key is checked. Examples are chunks of one byte,
and requests that are sent before the answers to earlier ones. So the server parses each connection
for at most a millisecond at a time, and then serves the others.

The class relies on private parts of ``HttpToolsProtocol``, which ``uvicorn_internals`` lists.
"""

import asyncio
import json
import logging
import math
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import httptools
from prometheus_client import Counter

from aftserve.http.uvicorn_internals import (
    STATUS_LINE,
    ASGI3Application,
    FlowControl,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from aftserve.observability.health import Health

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

_files_logger = logging.getLogger("aftserve.open_files")
logger = logging.getLogger("aftserve.request")

_SPARE_FILES = 8
"""Free file descriptors below which the log says that clients are cut off."""
_LOG_PAUSE_SECONDS = 60.0
_TURN_SECONDS = 0.001
_PIECE_BYTES = 4096
"""Bytes that are parsed at once, which takes at most about 0.5 ms."""
_MAX_HEADER_BYTES = 1 << 16
_FIRST_REQUEST_SECONDS = 0.5
"""Time from the start of a connection for its first request, if the server ends meanwhile."""
_LAST_REQUEST_SECONDS = 0.05
"""Time from the end of the server for a request that is on its way."""
_LAST_ANSWER_SECONDS = 2.0
"""Time for an idle client to end TLS, if the server ends."""
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBE_SECONDS = 1.0
_ANSWER_SECONDS = 0.1


class Connection(HttpToolsProtocol):
    """A connection that refuses malformed or slow requests, and clients that read nothing."""

    # uvicorn limits the time between two requests. It limits neither the time of the headers nor
    # that of an answer that the client does not read. ``BodyLimitMiddleware`` limits bodies,
    # because the application can send the reason. While the server drains, connections close after
    # their answer. Otherwise a client could not know whether its next request arrived before the
    # end.

    def __init__(
        self,
        *args: Any,
        seconds: float,
        responses: Counter,
        health: Health,
        files: "_DescriptorWatch",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._files = files
        self._seconds = seconds
        self._responses = responses
        self._health = health
        self._header_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._turn: asyncio.Handle | None = None
        self._unparsed = bytearray()
        self._silent_bytes = 0
        self._in_headers = True
        self._started: float | None = None
        self._refused = False
        self._probe: _DepartureProbe | None = None
        self._half_closed = False
        self._ending = False

    @classmethod
    def within(cls, seconds: float, responses: Counter, health: Health) -> Any:
        """Return a factory of connections with these limits."""
        files = _DescriptorWatch()
        return partial(cls, seconds=seconds, responses=responses, health=health, files=files)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._made = self.loop.time()
        self._files.note(transport.get_extra_info("socket").fileno())
        self.flow = self._flow = _ReadFlow(transport)
        self._unread = _UnreadAnswerTimeout(transport, self._seconds)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Parse as much as one turn allows."""
        if self.timeout_keep_alive_task is not None:  # the data is of a later request
            self._start_header_timer()
        self._unset_keepalive_if_required()
        if not self._refused:
            self._unparsed += data
            self._parse()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection as long as a complete request is unanswered."""
        if self.scheme == "https":
            return False  # TLS has no half-closed connections in asyncio
        self._half_closed = True
        if self._owes_answer and self._probe is None:
            self._probe = _DepartureProbe(self.transport, self._may_send_interim)
        return self._owes_answer

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        if self._probe is not None:
            self._probe.cancel()
        self._unparsed.clear()
        self._cancel_header_timer()
        self._unread.cancel()
        if self._running is not None:  # uvicorn notifies only the last request
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn 0.54 leaves this timer after a reset

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self._unread.start()

    def resume_writing(self) -> None:
        """End the wait for the client to read, or begin it for the rest of the last answer."""
        super().resume_writing()
        self._unread.cancel()
        self._unread.start_if_closing()

    def on_message_begin(self) -> None:
        """Note the start of a request."""
        self._in_headers = True
        super().on_message_begin()
        self.scope["state"]["started"] = self._started or time.monotonic()
        self._started = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; ignore trailers, which arrive after the application has started."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the headers, and start the application."""
        self._in_headers = False
        self._silent_bytes = 0
        self._unset_keepalive_if_required()  # bytes that were read in time may be parsed late
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("CONNECT is for proxies")
            return
        _check_headers(self.parser.get_http_version(), self.url, self.headers)
        self._cancel_header_timer()
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # a client of HTTP/1.0 would read it as the answer
        super().on_headers_complete()
        # uvicorn 0.46 overlooks "close" in a list, such as "close, Upgrade".
        self.cycle.keep_alive = self.cycle.keep_alive and self.parser.should_keep_alive()
        if self.pipeline:
            self._flow.resume_reading()  # otherwise a disconnect would go unnoticed

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, unless it is parsed again without its upgrade."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if self._ending or self._health.phase == "draining":
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Wait for the next request while uvicorn keeps the connection."""
        super().on_response_complete()
        if self._idle and self._has_partial_request:  # a part of the next request has arrived
            self._unset_keepalive_if_required()
            self._start_header_timer()
        self._parse()
        self._unread.start_if_closing()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a further request."""
        super().timeout_keep_alive_handler()
        self._unread.start_if_closing()

    def shutdown(self) -> None:
        """Close the connection after the answers to current requests."""
        self._ending = True
        if not self._idle:
            super().shutdown()
            return
        seconds = _LAST_REQUEST_SECONDS
        if self.cycle is None:
            seconds = max(seconds, self._made + _FIRST_REQUEST_SECONDS - self.loop.time())
        self.loop.call_later(seconds, self._close_unused)

    def _close_unused(self) -> None:
        # A request that has begun to arrive keeps its usual time for the rest of its headers.
        if self._idle and not self._has_partial_request and not self.transport.is_closing():
            self.transport.close()
            self._unread.start_if_closing()
            if self.scheme == "https":
                # A client that keeps an idle connection does not read the end of TLS, which
                # asyncio awaits for 30 s.
                self.loop.call_later(_LAST_ANSWER_SECONDS, self.transport.abort)

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _has_partial_request(self) -> bool:
        """Whether a part of an unanswered request has arrived."""
        return bool(self._unparsed) or (self._in_headers and self.scope is not None)

    @property
    def _owes_answer(self) -> bool:
        """Whether a complete request is unanswered, or unparsed bytes may hold one."""
        running = self._running
        waits = running is not None and not (running.response_complete or running.more_body)
        return waits or bool(self._unparsed)

    def _may_send_interim(self) -> bool:
        running = self._running
        return (
            self._owes_answer
            and running is not None
            and running.scope["http_version"] == "1.1"
            and not (running.response_started or running.more_body)
        )

    def _parse(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        end = self.loop.time() + _TURN_SECONDS
        # Parse a pipelined request only after the answer to the request before it.
        while self._unparsed and not self.pipeline and not self.transport.is_closing():
            if self.loop.time() > end:
                self._turn = self.loop.call_soon(self._parse)
                break
            piece = bytes(self._unparsed[:_PIECE_BYTES])
            del self._unparsed[:_PIECE_BYTES]
            self._parse_piece(piece)
        if self._half_closed and not self._owes_answer and not self.transport.is_closing():
            self.transport.close()
            self._unread.start_if_closing()
        if not self.transport.is_closing():
            self._flow.pause_for_parser(bool(self._unparsed))

    def _parse_piece(self, piece: bytes) -> None:
        self._silent_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser treats all following bytes, also the body, as another protocol.
            self._unparsed[:0] = self._plain_headers() + piece[upgrade.args[0] :]
            self._started = self.scope["state"]["started"]  # the time of the first parse counts
            self.parser = self._parser()  # the old parser takes no more bytes
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _UnknownCodingError):
                self._refuse(501, f"{error.__context__}.")
            else:
                self._refuse(400, f"This is not HTTP: {error.__context__ or error}.")
        else:
            if self._silent_bytes > _MAX_HEADER_BYTES:
                self._refuse(431, f"The headers have more than {_MAX_HEADER_BYTES} bytes.")

    def _parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _plain_headers(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        return _headers_without_upgrade(method, self.url, version, self.headers)

    def _refuse(self, status: int, problem: str) -> None:
        logger.info("no request: %s", problem, extra={"fields": {"status": status}})
        self._responses.labels("other", str(status), "").inc()
        self._refused = True
        self._unparsed.clear()
        if self._running is not None and self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()  # it cannot be answered
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
        if not (self._idle or self.cycle.more_body):
            self.cycle.keep_alive = False  # earlier requests are answered first
            return
        if self._idle or not self.cycle.response_started:
            self.transport.write(_refusal(status, problem))
        self.transport.close()
        self._unread.start_if_closing()

    def _start_header_timer(self) -> None:
        if self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self._seconds, self._refuse_late_headers)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse_late_headers(self) -> None:
        if not self.transport.is_closing():
            problem = f"The headers did not arrive within {self._seconds:g} s."
            self._refuse(408, problem)


def raise_limit() -> None:
    """Raise the process's limit to its maximum; shells and systemd set a lower one."""
    if resource is None:
        return
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    except (OSError, ValueError) as error:  # macOS accepts less than its own maximum
        _files_logger.debug("the limit of open files stays: %s", error)


class _DescriptorWatch:
    """A watch that logs when the limit is reached, because the system then drops connections."""

    def __init__(self) -> None:
        self._limit = math.inf
        if resource is not None:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            self._limit = math.inf if limit == resource.RLIM_INFINITY else limit
        self._next = -math.inf

    def note(self, number: int) -> None:
        """Take note of a new descriptor, which was the lowest free one."""
        if number < self._limit - _SPARE_FILES or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LOG_PAUSE_SECONDS
        _files_logger.error(
            "%d files are open, the limit is %d, and each connection is one: further clients are"
            " cut off; raise the limit (ulimit -n), or let fewer connect",
            number + 1,
            self._limit,
        )


class _ReadFlow(FlowControl):
    """Flow control that also stops reading while earlier bytes are not parsed."""

    _paused_by_application = _paused_by_parser = False

    def pause_reading(self) -> None:
        """Stop reading for the application."""
        self._paused_by_application = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """Resume reading for the application, unless the parser has unparsed bytes."""
        self._paused_by_application = False
        self.pause_for_parser(self._paused_by_parser)

    def pause_for_parser(self, paused: bool) -> None:
        """Stop reading, or resume unless the application has stopped it too."""
        self._paused_by_parser = paused
        if paused:
            super().pause_reading()
        elif not self._paused_by_application:
            super().resume_reading()


def _refusal(status: int, problem: str) -> bytes:
    """Return a response that ends the connection, for a request that no application gets."""
    content = json.dumps({"detail": problem}).encode()
    headers = (
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
        "connection: close\r\n\r\n"
    )
    return STATUS_LINE[status] + headers.encode() + content


def _headers_without_upgrade(
    method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Return the headers of a request without its upgrade to another protocol."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])


class _UnknownCodingError(Exception):
    """A body has an unknown transfer coding; RFC 9112 requires status 501."""


def _check_headers(version: str, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Check the head of a request: its hosts, path and transfer coding."""
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts != 1 and version == "1.1":
        raise httptools.HttpParserError(f"{hosts} Host headers")
    codings = b", ".join(value for name, value in headers if name == b"transfer-encoding")
    codings = codings.strip().lower()
    # The parser would ignore the other codings.
    if codings.endswith(b"chunked") and codings != b"chunked":
        raise _UnknownCodingError(
            "The transfer coding must be chunked only: send the body without other codings"
        )
    if not url.startswith((b"/", b"*")) and not httptools.parse_url(url).path:
        raise httptools.HttpParserError("a URL without a path")


class _DepartureProbe:
    """A timer that sends interim responses, and drops the connection once one is refused."""

    # A client that closes its socket and one that only ends its side look the same to the server.
    # After a closed socket, the client's system answers the next bytes with a reset. Every client
    # of HTTP/1.1 must skip interim responses (RFC 9110, 15.2).

    def __init__(self, transport: asyncio.Transport, may_send: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_send = may_send
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(_PROBE_SECONDS, self._send)

    def cancel(self) -> None:
        """Send no more."""
        self._next.cancel()

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        if self._may_send():
            self._transport.write(_INTERIM)
        self._next = self._loop.call_later(_ANSWER_SECONDS, self._look)

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        # The loop reads nothing after the end of the client's side, and does not see a reset.
        connection = self._transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        else:
            self._next = self._loop.call_later(_PROBE_SECONDS, self._send)


class _UnreadAnswerTimeout:
    """A timer that aborts a connection whose client has read nothing for some seconds."""

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        self._transport = transport
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to wait for the client to read."""
        unread_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._seconds, self._check, unread_bytes)

    def start_if_closing(self) -> None:
        """Begin to wait if the connection is closing; uvicorn waits for its end."""
        if self._transport.is_closing() and self._timer is None:
            self.start()

    def cancel(self) -> None:
        """End the wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, unread_bytes: int) -> None:
        if self._transport.get_write_buffer_size() < unread_bytes:
            self.start()
        else:
            self._transport.abort()  # close() would wait until everything is read
