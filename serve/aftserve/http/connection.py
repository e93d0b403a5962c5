"""A connection of one client: what it may send before it is a request, and how long that may take.

A few bytes can be much work for whoever parses them, all of it before any API key is looked at:
chunks of one byte, requests that are sent ahead of their answers. So each connection is parsed for
a millisecond at most, and then the others have their turn.
"""

import asyncio
import json
import logging
import time
from functools import partial
from typing import Any

import httptools
from prometheus_client import Counter
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from aftserve.http.departure_probe import DepartureProbe
from aftserve.http.file_descriptors import OpenFiles
from aftserve.observability.health import Health

logger = logging.getLogger("aftserve.request")

_TURN_SECONDS = 0.001
_PIECE_BYTES = 4096
"""At most some 0.5 ms of work."""
_MOST_HEADER_BYTES = 1 << 16
_FIRST_REQUEST_SECONDS = 0.5
_LAST_REQUEST_SECONDS = 0.05
"""Time for a request that is under way when the server ends: from the beginning of a connection
that had none yet, and from the end of the server for others."""


class _UnknownCodingError(Exception):
    """A body is coded in a way that RFC 9112 wants to be answered 501 where it is not known."""


class _Flow(FlowControl):
    """Reads nothing while the request has enough, nor while what was read is not yet parsed."""

    _full = _held = False

    def pause_reading(self) -> None:
        self._full = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._full = False
        self.hold(self._held)

    def hold(self, held: bool) -> None:
        """Stops reading, or goes on where nothing else speaks against it."""
        self._held = held
        if held:
            super().pause_reading()
        elif not self._full:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """Refuses what is no request, headers that are too large or too slow, and who reads nothing.

    uvicorn bounds the time between two requests, not that of the first line to the last header, nor
    that of an answer which nobody reads. Bodies are the application's to bound: it can say why.

    Args:
        seconds: from the connection, or the first byte of a later request, to the end of the
            headers, and those in which nothing is read of an answer that waits.
        responses: counts refusals by path and status.
        health: while it drains, no connection is kept for another request: who sends one would
            not know whether it came before the end.
        files: takes note of each connection.
    """

    def __init__(
        self,
        *args: Any,
        seconds: float,
        responses: Counter,
        health: Health,
        files: OpenFiles,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._files = files
        self._seconds = seconds
        self._responses = responses
        self._health = health
        self._waiting: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._turn: asyncio.Handle | None = None
        self._unparsed = bytearray()
        self._silent_bytes = 0
        self._in_headers = True
        self._started: float | None = None
        self._refused = False
        self._probe: DepartureProbe | None = None
        self._half_closed = False
        self._ending = False

    @classmethod
    def within(cls, seconds: float, responses: Counter, health: Health) -> Any:
        """The class, for a server whose clients have so long."""
        files = OpenFiles()
        return partial(cls, seconds=seconds, responses=responses, health=health, files=files)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._made = self.loop.time()
        self._files.note(transport.get_extra_info("socket").fileno())
        self.flow = self._flow = _Flow(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parses what it can in its turn."""
        if self.timeout_keep_alive_task is not None:  # of a request that is not the first
            self._watch()
        self._unset_keepalive_if_required()
        if not self._refused:
            self._unparsed += data
            self._parse()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection while a request that arrived whole before the end has no answer."""
        self._half_closed = True
        if self._owes_answer and self._probe is None:
            self._probe = DepartureProbe(self.transport, self._may_send_interim)
        return self._owes_answer

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        if self._probe is not None:
            self._probe.cancel()
        self._unparsed.clear()
        self._rest()
        self._expect_no_reading()
        if self._running is not None:  # uvicorn tells that to the one that came last
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Waits for the client to read."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Goes on."""
        super().resume_writing()
        self._expect_no_reading()

    def on_message_begin(self) -> None:
        """A request begins, and its client's wait."""
        self._in_headers = True
        super().on_message_begin()
        self.scope["state"]["started"] = self._started or time.monotonic()
        self._started = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; those behind a body come too late for the application."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Checks what the parser does not, and starts the application."""
        self._in_headers = False
        self._silent_bytes = 0
        self._unset_keepalive_if_required()  # what was read in time may be parsed later
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("CONNECT is for proxies")
            return
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts != 1 and self.parser.get_http_version() == "1.1":
            raise httptools.HttpParserError(f"{hosts} Host headers")
        codings = b", ".join(value for name, value in self.headers if name == b"transfer-encoding")
        codings = codings.strip().lower()
        if codings.endswith(b"chunked") and codings != b"chunked":  # the parser takes it for that
            raise _UnknownCodingError(
                "The body is coded, and then sent in chunks: send it as it is"
            )
        if not self.url.startswith((b"/", b"*")) and not httptools.parse_url(self.url).path:
            raise httptools.HttpParserError("a URL without a path")
        self._rest()
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # it would be taken for the answer
        super().on_headers_complete()
        if self.pipeline:
            self._flow.resume_reading()  # or nobody would see that the client has left

    def on_body(self, body: bytes) -> None:
        """Takes a part of the body."""
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request ends."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if self._ending or self._health.phase == "draining":
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Waits for the next request, as long as uvicorn keeps the connection."""
        super().on_response_complete()
        if self._idle and self._begun:  # some came ahead
            self._unset_keepalive_if_required()
            self._watch()
        self._parse()
        self._expect_end()

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection on which no request follows."""
        super().timeout_keep_alive_handler()
        self._expect_end()

    def shutdown(self) -> None:
        """Close the connection, after the answers to requests that are under way."""
        self._ending = True
        if not self._idle:
            super().shutdown()
            return
        seconds = _LAST_REQUEST_SECONDS
        if self.cycle is None:
            seconds = max(seconds, self._made + _FIRST_REQUEST_SECONDS - self.loop.time())
        self.loop.call_later(seconds, self._close_unused)

    def _close_unused(self) -> None:
        # A request that has begun has its usual time for the rest of its headers.
        if self._idle and not self._begun and not self.transport.is_closing():
            self.transport.close()
            self._expect_end()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _begun(self) -> bool:
        """Whether a part of a request has arrived that is not answered."""
        return bool(self._unparsed) or (self._in_headers and self.scope is not None)

    @property
    def _owes_answer(self) -> bool:
        """Whether a whole request has no answer yet, or bytes wait that may hold one."""
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
        # Requests that came ahead of their turn are not parsed ahead of it.
        while self._unparsed and not self.pipeline and not self.transport.is_closing():
            if self.loop.time() > end:
                self._turn = self.loop.call_soon(self._parse)
                break
            piece = bytes(self._unparsed[:_PIECE_BYTES])
            del self._unparsed[:_PIECE_BYTES]
            self._parse_piece(piece)
        if self._half_closed and not self._owes_answer and not self.transport.is_closing():
            self.transport.close()
            self._expect_end()
        if not self.transport.is_closing():
            self._flow.hold(bool(self._unparsed))

    def _parse_piece(self, piece: bytes) -> None:
        self._silent_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser takes all that follows for another protocol's, also the body.
            self._unparsed[:0] = self._without_upgrade() + piece[upgrade.args[0] :]
            self._started = self.scope["state"]["started"]  # not when it is parsed again
            self.parser = self._parser()  # the one before may take no more
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _UnknownCodingError):
                self._refuse(501, f"{error.__context__}.")
            else:
                self._refuse(400, f"This is not HTTP: {error.__context__ or error}.")
        else:
            if self._silent_bytes > _MOST_HEADER_BYTES:
                self._refuse(431, f"The headers have more than {_MOST_HEADER_BYTES} bytes.")

    def _parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _without_upgrade(self) -> bytes:
        """The headers that were parsed, of a request that asks for no other protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _refuse(self, status: int, problem: str) -> None:
        logger.info("no request: %s", problem, extra={"fields": {"status": status}})
        self._responses.labels("other", str(status)).inc()
        self._refused = True
        self._unparsed.clear()
        if self._running is not None and self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()  # nobody could answer it
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
        if not (self._idle or self.cycle.more_body):
            self.cycle.keep_alive = False  # those before are answered first
            return
        if self._idle or not self.cycle.response_started:
            content = json.dumps({"detail": problem}).encode()
            headers = (
                f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + headers.encode() + content)
        self.transport.close()
        self._expect_end()

    def _expect_end(self) -> None:
        """What is written to a connection that closes must be read; uvicorn waits for that."""
        if self.transport.is_closing() and self._unread is None:
            self._expect_reading()

    def _expect_reading(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self._seconds, self._check_read, left)

    def _expect_no_reading(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _check_read(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._expect_reading()
        else:
            self.transport.abort()  # to close it would be to wait until all is read

    def _watch(self) -> None:
        if self._waiting is None and not self.transport.is_closing():
            self._waiting = self.loop.call_later(self._seconds, self._overdue)

    def _rest(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _overdue(self) -> None:
        if not self.transport.is_closing():
            problem = f"The headers did not arrive within {self._seconds:g} s."
            self._refuse(408, problem)
