"""One call of gRPC: its API key, limits, deadline, error status, metrics and log line."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import grpc
from fastapi.exceptions import RequestValidationError

from aftexport.errors import (
    AftexportError,
    EngineError,
    InputError,
    StorageError,
    panics_as_errors,
)
from aftserve.api.api_keys import Keys, given_keys
from aftserve.api.error_responses import describe, status_of
from aftserve.errors import BusyError, DeadlineError, RefusedError
from aftserve.grpc.addresses import close_connection, peer_host
from aftserve.http.access_log import REQUEST_ID, name_request
from aftserve.http.body_limits import BodyTooLargeError, full_buffer, late_request
from aftserve.http.clients import SharedBytes, client_at, current_client
from aftserve.serving.service import SharedResources

logger = logging.getLogger("aftserve.request")

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"

_problems = logging.getLogger("aftserve.problems")
_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""The status of gRPC for each HTTP status; INTERNAL for others."""
_ARRIVAL_SECONDS = 0.1
"""Time by which the deadline of a client may come before that of its call at the server."""
_SMALL_BYTES = 1 << 10
"""Maximum size of a message that has only names."""
_MAX_SMALL_READS = 2
"""Maximum number of such messages that arrive at a time, as a client may send a large one."""
_SMALL_SECONDS = 0.1
"""Time for such a message while others wait."""
Access = Literal["open", "key", "admin"]
"""The right that a method needs: none, an API key, or one that is marked admin."""


async def _no_stream(message: bytes) -> None:
    raise AssertionError("the method has one response")


@dataclass
class Call:
    """A call from its first handling."""

    started: float  # by time.monotonic()
    deadline: float  # the client's or the server's, by time.monotonic()
    metadata: Sequence[tuple[str, str]]  # without binary values
    fields: dict[str, Any] = field(default_factory=dict)  # of its log line
    model: str = ""  # name of the loaded model; empty without one
    # Called when its answer is known.
    releases: list[Callable[[], None]] = field(default_factory=list)
    # Gives back the share of the buffer beyond a number of bytes.
    keep: Callable[[int], None] = lambda _: None
    send: Callable[[bytes], Awaitable[None]] = _no_stream  # sends a message of a stream


Method = Callable[[bytes, Call], Awaitable[bytes]]
"""A method: from the bytes of a request to those of its response."""


@dataclass(frozen=True)
class Rules:
    """The rules for the calls of a method."""

    access: Access = "key"  # the server's deadline limits no method of administrators
    is_read: bool = True  # whether its message is read, and not empty by definition
    is_large: bool = False  # whether its message may have --max-body-mib, and not only names
    is_stream: bool = False  # whether it sends messages by Call.send while the client listens
    is_probe: bool = False  # whether machines call it every few seconds


class Refusal(NamedTuple):
    """The end of a call without a response."""

    code: grpc.StatusCode
    text: str
    retry_after: int | None = None


class Caller:
    """Runs the calls of all methods."""

    # keys: None to serve everyone

    def __init__(self, shared: SharedResources, keys: Keys | None) -> None:
        settings = shared.settings
        self._shared = shared
        self._keys = keys
        self._buffer = MessageBuffer(settings.max_buffered_bytes)
        self._small_reads = _SmallReads()
        self.has_keys = keys is not None
        self.max_message_bytes = min(settings.max_body_bytes, settings.max_buffered_bytes)
        self.port = 0
        self.running = 0  # calls whose message has arrived, and whose answer is not known
        self.unread = 0  # calls whose answer has not left

    def handler(self, path: str, method: Method, rules: Rules) -> grpc.RpcMethodHandler:
        """Return the handler of a method.

        It is the handler of a stream, which is the same on the wire. gRPC would receive the message
        of a unary call before any check.
        """

        async def run(_: object, context: Context) -> bytes:
            call = self._begin(context, rules)
            refusal, code = None, grpc.StatusCode.UNKNOWN
            try:
                with panics_as_errors():
                    response = await self._answer(context, call, method, rules)
                code = grpc.StatusCode.OK
            except asyncio.CancelledError:  # gRPC cancels the task at the client's deadline too
                is_late = time.monotonic() >= call.deadline - _ARRIVAL_SECONDS
                code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
                raise
            except Exception as error:
                refusal = refusal_of(error)
                code = refusal.code
            finally:
                self._end(path, call, code, is_probe=rules.is_probe)
            timer = self._await_reader(context)
            context.add_done_callback(lambda _: timer.cancel())
            named = (REQUEST_ID, call.fields["request_id"])
            if refusal is None:
                context.set_trailing_metadata((named,))
                return response
            seconds = refusal.retry_after
            retry = () if seconds is None else (("retry-after", str(seconds)),)
            await context.abort(refusal.code, refusal.text, (named, *retry))
            raise AssertionError("abort raises")

        if rules.is_stream:
            return grpc.stream_stream_rpc_method_handler(run)
        return grpc.stream_unary_rpc_method_handler(run)

    def _begin(self, context: Context, rules: Rules) -> Call:
        started = time.monotonic()
        left = context.time_remaining()
        is_limited = rules.access != "admin" and not rules.is_stream
        most = self._shared.settings.deadline_seconds if is_limited else math.inf
        deadline = started + min(math.inf if left is None else left, most)
        metadata = [one for one in context.invocation_metadata() or () if isinstance(one[1], str)]
        name = name_request(dict(metadata).get(REQUEST_ID, ""))
        return Call(started, deadline, metadata, {"request_id": name})

    async def _answer(
        self,
        context: Context,
        call: Call,
        method: Method,
        rules: Rules,
    ) -> bytes:
        client = client_at(peer_host(context.peer()))
        if self._keys is not None and rules.access != "open":
            owner = self._keys.owner(*given_keys(call.metadata))
            call.fields["key"] = owner
            self._keys.count(owner)
            client = self._keys.client(owner)
            if rules.access == "admin":
                self._keys.check_admin(owner)
        current_client.set(client)
        timeout = asyncio.timeout(call.deadline - time.monotonic())
        try:
            async with timeout:
                if rules.is_large:
                    async with self._received(context, call) as content:
                        return await method(content, call)
                content = await self._small(context, call) if rules.is_read else b""
                if rules.is_stream:
                    call.send = partial(self._send, context)
                else:
                    self._accept(context, call)
                return await method(content, call)
        except TimeoutError:
            if timeout.expired():
                raise DeadlineError from None
            raise

    @asynccontextmanager
    async def _received(self, context: Context, call: Call) -> AsyncIterator[bytes]:
        """Receive a large message, whose bytes the buffer holds until the answer.

        Raises:
            BusyError: if the buffer stays full.
            SlowClientError: if the message does not arrive in time.
            InputError: if the client sends none.
        """
        held, client = self.max_message_bytes, current_client.get().name
        end = self._end_of_arrival(call)
        try:
            async with asyncio.timeout(end - time.monotonic()):
                await self._buffer.reserve(held, client)
        except TimeoutError:
            raise full_buffer() from None

        def keep(count: int) -> None:
            nonlocal held
            self._buffer.release(held - count, client)
            held = count

        call.keep = keep
        try:
            content = await self._read(context, end)
            self._accept(context, call)
            yield content
        finally:
            self._buffer.release(held, client)

    async def _small(self, context: Context, call: Call) -> bytes:
        """Receive a message that has only names.

        Raises:
            BusyError: if too many others arrive.
            SlowClientError: if the message does not arrive in time.
            BodyTooLargeError: if it is large.
            InputError: if the client sends none.
        """
        end = self._end_of_arrival(call)
        async with self._small_reads.turn(end):
            content = await self._read(context, end)
        if len(content) > _SMALL_BYTES:
            raise BodyTooLargeError(
                f"Expected a message of at most {_SMALL_BYTES} bytes, got {len(content)}.",
                "Send only the names that the method needs.",
            )
        return content

    def _end_of_arrival(self, call: Call) -> float:
        return call.started + self._shared.settings.receive_seconds

    async def _read(self, context: Context, end: float) -> bytes:
        timeout = asyncio.timeout(end - time.monotonic())
        try:
            async with timeout:
                content: bytes = await context.read()
        except TimeoutError:
            if timeout.expired():
                raise late_request(self._shared.settings.receive_seconds) from None
            raise
        if content is grpc.aio.EOF:
            raise InputError("Expected a message, got none.", "Send one message in each call.")
        return content

    async def _send(self, context: Context, message: bytes) -> None:
        """Send a message of a stream."""
        timer = self._await_reader(context)
        try:
            await context.write(message)
        except grpc.aio.InternalError:  # the client has gone
            raise asyncio.CancelledError from None
        finally:
            timer.cancel()

    def _await_reader(self, context: Context) -> asyncio.TimerHandle:
        """Begin to wait for the client to read what is sent next; close its connection if late.

        gRPC cannot end a single call whose answer is not read.
        """
        seconds, task = self._shared.settings.receive_seconds, asyncio.current_task()
        loop, peer = asyncio.get_running_loop(), context.peer()

        def close() -> None:
            if task is not None:
                task.cancel()
            logger.info("gRPC closes the connection of %s: no read in %g s", peer, seconds)
            loop.run_in_executor(None, close_connection, peer, self.port)

        return loop.call_later(seconds, close)

    def _accept(self, context: Context, call: Call) -> None:
        """Count a call whose message has arrived, until its answer has left."""

        def know() -> None:
            self.running -= 1
            self.unread += 1

        def leave(_: object) -> None:
            self.unread -= 1

        self.running += 1
        call.releases.append(know)
        context.add_done_callback(leave)

    def _end(self, path: str, call: Call, code: grpc.StatusCode, *, is_probe: bool) -> None:
        """Count and log a call whose answer is known; an answer that waits holds no model."""
        for release in call.releases:
            release()
        self._shared.metrics.responses.labels(path, code.name, call.model).inc()
        call.fields["seconds"] = round(time.monotonic() - call.started, 6)
        is_quiet = is_probe and code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
        level = logging.DEBUG if is_quiet else logging.INFO
        logger.log(level, "gRPC %s %s", path, code.name, extra={"fields": call.fields})


class _SmallReads:
    """Turns to read messages that have only names.

    Such a message has arrived with the headers of its call, and takes no time. A client that sends
    a large or a slow one loses its turn once others wait.
    """

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_MAX_SMALL_READS)
        self._waiting = 0
        self._reading = list[asyncio.Timeout]()

    @asynccontextmanager
    async def turn(self, end: float) -> AsyncIterator[None]:
        """Read within the block.

        Raises:
            BusyError: if the turn does not come, or is lost.
        """
        # end: by time.monotonic()
        busy = BusyError("Too many messages are arriving.", "Try again later.", 1)
        self._waiting += 1
        self._hurry()
        try:
            async with asyncio.timeout(end - time.monotonic()):
                await self._turns.acquire()
        except TimeoutError:
            raise busy from None
        finally:
            self._waiting -= 1
        turn = asyncio.timeout(None)
        try:
            async with turn:
                self._reading.append(turn)
                self._hurry()
                yield
        except TimeoutError:
            if turn.expired():
                raise busy from None
            raise
        finally:
            self._reading.remove(turn)
            self._turns.release()

    def _hurry(self) -> None:
        """Limit the time of all turns if a call waits for one."""
        if self._waiting and self._turns.locked():
            latest = asyncio.get_running_loop().time() + _SMALL_SECONDS
            for one in self._reading:
                if one.when() is None:
                    one.reschedule(latest)


def refusal_of(error: Exception) -> Refusal:
    """Return the status and the text of an error; log it if the server is at fault."""
    match error:
        case RequestValidationError():
            return Refusal(grpc.StatusCode.INVALID_ARGUMENT, describe(error))
        case BodyTooLargeError():  # as gRPC answers to a message over its own limit
            return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        case AftexportError():
            if isinstance(error, EngineError | StorageError):
                _problems.error("%s", error)
            code = _CODES.get(status_of(error), grpc.StatusCode.INTERNAL)
            after = error.retry_after if isinstance(error, RefusedError) else None
            return Refusal(code, str(error), after)
        case _:
            _problems.error("a call failed", exc_info=error)
            return Refusal(grpc.StatusCode.INTERNAL, "The server failed. See its log.")


class MessageBuffer:
    """The bytes of all messages, each from its arrival to its answer; see ``SharedBytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._bytes = SharedBytes(max_bytes)
        self._waiting = deque[tuple[asyncio.Future[None], int, str]]()

    async def reserve(self, count: int, client: str) -> None:
        """Reserve bytes, in the order of the callers of a client; wait until they are free."""
        if self._bytes.has_room(client, count):
            self._bytes.add(client, count)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, count, client))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the bytes came at the same moment
                self.release(count, client)
            raise

    def release(self, count: int, client: str) -> None:
        """Give bytes back, to the callers that wait for them."""
        self._bytes.add(client, -count)
        for _ in range(len(self._waiting)):
            turn, wanted, other = self._waiting.popleft()
            if turn.cancelled():
                continue
            if self._bytes.has_room(other, wanted):
                self._bytes.add(other, wanted)
                turn.set_result(None)
            else:
                self._waiting.append((turn, wanted, other))
