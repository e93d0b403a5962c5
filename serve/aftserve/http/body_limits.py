"""Limits on request bodies: the time and size of each, and the size of all together.

The limits on sizes hold for the bytes that arrive, and for the expanded bytes of a compressed body.
"""

import asyncio
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aftserve.errors import BusyError, RefusedError
from aftserve.http.clients import SharedBytes, current_client

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

IDENTITY = "identity"
"""The coding of a body that is not compressed."""
_PIECE_BYTES = 4096
"""Input of one step. It bounds the work of a step on members that expand to nothing."""
_GZIP_BITS = 31
"""zlib's number for a gzip header and the largest window, of 32 KiB."""
_MAX_ZSTD_WINDOW_LOG = 23
"""8 MiB, the largest window that RFC 9659 allows in HTTP."""
_MAX_WINDOW_BYTES = {"gzip": 1 << 15, "zstd": 1 << _MAX_ZSTD_WINDOW_LOG}
_SETTLE_SECONDS = 0.1
_PART_BYTES = 1 << 16
"""Maximum bytes of a compressed body that are expanded at once."""


class BodyTooLargeError(RefusedError):
    """A request's body is over the limit."""

    status = 413


class SlowClientError(RefusedError):
    """A request did not arrive in time, or its body was not expanded in time."""

    status = 408


def late_request(seconds: float) -> SlowClientError:
    """Return the error of a request that did not arrive within a number of seconds."""
    return SlowClientError(f"The request did not arrive within {seconds:g} s.", "Send it faster.")


def full_buffer() -> BusyError:
    """Return the error of a request for which the buffer of all bodies has no space."""
    return BusyError("Too many large requests are arriving.", "Try again later.", 1)


class BodyLimitMiddleware:
    """ASGI middleware that refuses bodies that are too large or too slow, and expands them."""

    # The application gets the headers of the compressed body. All bodies that are held at a time
    # share a buffer; the time runs from the first byte of a request to the end of its expansion. If
    # a client is refused while it still sends, the rest of its body is received and discarded until
    # its time is up. Otherwise the client would never read the reason. The connection is kept if
    # the rest arrives within 0.1 s, and closed otherwise.

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_buffered_bytes: int, seconds: float
    ) -> None:
        self._app = app
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.buffer = SharedBytes(max_buffered_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with a limited body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The time counts from the request's first byte, so slow headers leave less for the body.
        deadline = scope["state"]["started"] + self.seconds
        body = _Body(self, scope["headers"], receive, deadline)
        scope["state"]["body"] = body

        async def send_and_listen(message: Message) -> None:
            if message["type"] == "http.response.start":
                await body.settle()
            if not body.complete:
                if message["type"] == "http.response.start":
                    headers = [*message.get("headers", ()), (b"connection", b"close")]
                    message = {**message, "headers": headers}
                elif not message.get("more_body"):
                    await send({**message, "more_body": True})
                    await body.discard()
                    message = {"type": "http.response.body"}
            await send(message)

        try:
            await self._app(scope, body.receive, send_and_listen)
        finally:
            body.release()


class _Body:
    """The body of one request, as it arrives."""

    def __init__(
        self,
        limits: BodyLimitMiddleware,
        headers: Sequence[tuple[bytes, bytes]],
        receive: Receive,
        deadline: float,
    ) -> None:
        named = dict(headers)
        length = named.get(b"content-length", b"0")
        self.complete = length == b"0" and b"transfer-encoding" not in named
        self._announced = int(length) if length.isdigit() else 0
        self._awaits_interim = b"expect" in named
        self._limits = limits
        self._receive = receive
        self._deadline = deadline
        self._bytes = 0
        self._held = 0
        self._client = ""
        self._value_bytes = 0
        self._max_bytes = limits.max_bytes
        self._holds = True
        self._expanded_bytes = 0
        coding = coding_of(headers)
        is_expanded = coding in CODINGS and not self.complete
        self._expander = BodyExpander(coding) if is_expanded else None

    def allow(self, max_bytes: int) -> None:
        """Allow another size for a body that goes to a file as it arrives, and is not held."""
        # Of a compressed body, the window of its expansion is held until its end.
        self._max_bytes = max_bytes
        self._holds = False

    def hold_values(self, count: int) -> None:
        """Hold bytes of values in place of the body; BusyError if the buffer has no space."""
        self._fill_buffer(max(0, self._value_bytes + count - self._held))
        self._value_bytes += count

    async def receive(self) -> Message:
        """Return the next part, or the client's disconnect."""
        if self._expander is not None:
            return await self._receive_expanded(self._expander)
        if self.complete:
            return await self._receive()
        message = await self._receive_part()
        self._hold(len(message.get("body", b"")))
        return message

    async def _receive_part(self) -> Message:
        """Return the next part as it arrives, or the client's disconnect."""
        self._check(self._announced)
        self._awaits_interim = False
        message = await self._next(self._deadline)
        self._check(self._bytes)
        return message

    async def _receive_expanded(self, expander: "BodyExpander") -> Message:
        """Return the next part of the expanded body, or the client's disconnect."""
        while True:
            while not expander.needs_input:
                part = expander.step(_PART_BYTES)
                await asyncio.sleep(0)  # other requests have their turn between steps
                self._check_expansion_time()
                if part:
                    self._expanded_bytes += len(part)
                    self._check(self._expanded_bytes, "after expansion ")
                    self._hold(len(part))
                    self._hold_window(expander)
                    return {"type": "http.request", "body": part, "more_body": True}
            if self.complete:
                expander.finish()
                self._expander = None
                if not self._holds:
                    self.release()
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive_part()
            if message["type"] == "http.disconnect":
                return message
            expander.feed(message.get("body", b""))

    async def settle(self) -> None:
        """Receive the rest of the body for a moment; headers and body often arrive apart."""
        if self.complete:
            return
        self.release()
        deadline = min(self._deadline, time.monotonic() + _SETTLE_SECONDS)
        # Do not receive from a client that awaits an interim response: it would send the body.
        if not self._awaits_interim and self._announced <= self._max_bytes:
            await self._receive_rest(deadline, self._max_bytes)

    async def discard(self) -> None:
        """Receive and discard the rest of the body until its time is up."""
        self.release()
        await self._receive_rest(self._deadline, math.inf)

    def release(self) -> None:
        """Give back this body's share of the buffer."""
        if self._held:
            self._limits.buffer.add(self._client, -self._held)
            self._held = 0

    async def _receive_rest(self, deadline: float, max_bytes: float) -> None:
        with suppress(SlowClientError):
            while not self.complete and self._bytes <= max_bytes:
                await self._next(deadline)

    async def _next(self, deadline: float) -> Message:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise late_request(self._limits.seconds) from None
        self.complete = not message.get("more_body")
        self._bytes += len(message.get("body", b""))
        return message

    def _check_expansion_time(self) -> None:
        # No limit on sizes ends the work on members or frames that expand to nothing.
        if time.monotonic() > self._deadline:
            raise SlowClientError(
                f"The body must be expanded within {self._limits.seconds:g} s, got one that was "
                "not at its end.",
                "Compress it as one gzip member or one zstd frame.",
            )

    def _check(self, count: int, when: str = "") -> None:
        if count > self._max_bytes:
            raise BodyTooLargeError(
                f"The body must {when}have at most {self._max_bytes} bytes, got more.",
                "Send several smaller requests.",
            )

    def _hold(self, count: int) -> None:
        if self._holds:
            self._fill_buffer(count)

    def _hold_window(self, expander: "BodyExpander") -> None:
        """Hold the window of a body that is not held: past output that its stream keeps."""
        if not self._holds:
            window_bytes = min(self._expanded_bytes, expander.max_window_bytes)
            self._fill_buffer(max(0, window_bytes - self._held))

    def _fill_buffer(self, count: int) -> None:
        if not self._held:
            self._client = current_client.get().name  # an API key is checked before the body
        if not self._limits.buffer.has_room(self._client, count, self._held):
            raise full_buffer()
        self._held += count
        self._limits.buffer.add(self._client, count)


class BrokenBodyError(RefusedError):
    """A compressed body cannot be expanded."""

    status = 400


class _Stream(Protocol):
    """A decompressor of one gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _GzipMember:
    """A gzip member that keeps the input it has not consumed, as zstd's decompressor does."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP_BITS)
        self.eof = False
        self.unused_data = b""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        part = self._stream.decompress(self._stream.unconsumed_tail + data, max_length)
        self.eof, self.unused_data = self._stream.eof, self._stream.unused_data
        return part


def _zstd_frame() -> _Stream:
    parameter = zstd.DecompressionParameter.window_log_max
    return zstd.ZstdDecompressor(options={parameter: _MAX_ZSTD_WINDOW_LOG})


_STREAMS: dict[str, Callable[[], _Stream]] = {"gzip": _GzipMember, "zstd": _zstd_frame}
CODINGS = tuple(_STREAMS)
"""The names of the codings that the server expands."""


def coding_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the content coding of a request in lower case. Several are joined by commas."""
    values = [value.decode("latin-1") for name, value in headers if name == b"content-encoding"]
    coding = ",".join(values).strip().lower() or IDENTITY
    return "gzip" if coding == "x-gzip" else coding  # RFC 9110, 8.4.1.3


class BodyExpander:
    """The expansion of a compressed body in steps of bounded time and size."""

    def __init__(self, coding: str) -> None:
        self.max_window_bytes = _MAX_WINDOW_BYTES[coding]
        self._coding = coding
        self._new_stream = _STREAMS[coding]
        self._stream = self._new_stream()
        self._input = memoryview(b"")
        self._may_hold_output = False
        self._in_padding = False

    @property
    def needs_input(self) -> bool:
        """Whether all input is consumed, and all its output returned."""
        return not (self._input or self._may_hold_output or self._stream.unused_data)

    def feed(self, data: bytes) -> None:
        """Add the next part of the compressed body, once ``needs_input``."""
        self._input = memoryview(data)

    def step(self, max_bytes: int) -> bytes:
        """Return at most this many bytes of the expanded body; possibly none."""
        data = b""
        if self._stream.eof:  # a body may have several members or frames
            data = self._stream.unused_data
            self._stream, self._may_hold_output = self._new_stream(), False
            self._in_padding = self._coding == "gzip"
        if not (data or self._may_hold_output):
            data, self._input = bytes(self._input[:_PIECE_BYTES]), self._input[_PIECE_BYTES:]
        if self._in_padding:  # gzip ignores zeros after a member, as tapes and disks leave them
            data = data.lstrip(b"\0")
            self._in_padding = not data
        if not (data or self._may_hold_output):
            return b""
        try:
            part = self._stream.decompress(data, max_bytes)
        except (zlib.error, zstd.ZstdError) as error:
            raise BrokenBodyError(
                f"The body must be compressed by {self._coding}, got other bytes ({error}).",
                "Send it whole as the compressor wrote it, or without Content-Encoding.",
            ) from None
        self._may_hold_output = len(part) == max_bytes and not self._stream.eof
        return part

    def finish(self) -> None:
        """Check that the body is complete; BrokenBodyError if its end is missing."""
        if not (self._stream.eof or self._in_padding):
            raise BrokenBodyError(
                f"The body must be a complete {self._coding} stream, got one without its end.",
                "Send it whole as the compressor wrote it.",
            )
