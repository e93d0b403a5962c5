"""One call of gRPC: its API key, limits, deadline, error status, metrics and log line."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import grpc
from fastapi.exceptions import RequestValidationError
from fastapi.security.utils import get_authorization_scheme_param

from aftexport.errors import AftexportError, EngineError, InputError, StorageError
from aftserve.api.api_keys import Keys
from aftserve.api.error_responses import describe, status_of
from aftserve.errors import DeadlineError, RefusedError
from aftserve.grpc.addresses import peer_host
from aftserve.grpc.message_buffer import MessageBuffer
from aftserve.http.access_log import REQUEST_ID, name_request
from aftserve.http.body_limits import full_buffer, late_request
from aftserve.http.clients import client_at, current_client
from aftserve.serving.resources import SharedResources

logger = logging.getLogger("aftserve.request")
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


@dataclass
class Call:
    """A call from its first handling.

    Attributes:
        started: its start by ``time.monotonic``.
        deadline: its deadline by ``time.monotonic``, the client's or the server's.
        metadata: its metadata, without binary values.
        fields: fields of its log line.
        model: name of the loaded model that it belongs to; empty without one.
        releases: functions to call when its answer has left.
    """

    started: float
    deadline: float
    metadata: dict[str, str]
    fields: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    releases: list[Callable[[], None]] = field(default_factory=list)

    @property
    def api_keys(self) -> tuple[str, str]:
        """The keys in the two headers of HTTP; empty without one."""
        scheme, bearer = get_authorization_scheme_param(self.metadata.get("authorization"))
        return self.metadata.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""


Access = Literal["open", "key", "admin"]
"""The right that a method needs: none, an API key, or one that is marked admin."""
Method = Callable[[bytes, Call], Awaitable[bytes]]
"""A method: from the bytes of a request to those of its response."""


class Refusal(NamedTuple):
    """The end of a call without a response."""

    code: grpc.StatusCode
    text: str
    retry_after: int | None = None


class Caller:
    """Runs the calls of all methods.

    Args:
        shared: the settings and the metrics of the server.
        keys: the API keys; None to serve everyone.

    Attributes:
        has_keys: whether calls need API keys.
        max_message_bytes: maximum size of one message.
        accepted: number of calls whose message has arrived, and whose answer has not left.
    """

    def __init__(self, shared: SharedResources, keys: Keys | None) -> None:
        settings = shared.settings
        self._shared = shared
        self._keys = keys
        self._buffer = MessageBuffer(settings.max_buffered_bytes)
        self.has_keys = keys is not None
        self.max_message_bytes = min(settings.max_body_bytes, settings.max_buffered_bytes)
        self.accepted = 0

    def handler(
        self, path: str, method: Method, *, access: Access, is_probe: bool
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a method.

        It is the handler of a stream, which is the same on the wire. gRPC would receive the message
        of a unary call before any check.

        Args:
            path: full name of the method, for metrics and log.
            method: the method.
            access: right that it needs. The message of an open method is empty and is not read,
                and --deadline-seconds limits no method of administrators.
            is_probe: whether machines call it every few seconds.
        """

        async def run(_: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
            call = self._begin(context, access)
            refusal, code = None, grpc.StatusCode.UNKNOWN
            try:
                response = await self._answer(context, call, method, access)
                code = grpc.StatusCode.OK
            except asyncio.CancelledError:  # gRPC cancels the task at the client's deadline too
                is_late = time.monotonic() >= call.deadline - _ARRIVAL_SECONDS
                code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
                raise
            except Exception as error:
                refusal = refusal_of(error)
                code = refusal.code
            finally:
                self._end(path, call, code, is_probe=is_probe)
            named = (REQUEST_ID, call.fields["request_id"])
            if refusal is None:
                context.set_trailing_metadata((named,))
                return response
            seconds = refusal.retry_after
            retry = () if seconds is None else (("retry-after", str(seconds)),)
            await context.abort(refusal.code, refusal.text, (named, *retry))
            raise AssertionError("abort raises")

        return grpc.stream_unary_rpc_method_handler(run)

    def _begin(self, context: "grpc.aio.ServicerContext[bytes, bytes]", access: Access) -> Call:
        started = time.monotonic()
        left = context.time_remaining()
        most = math.inf if access == "admin" else self._shared.settings.deadline_seconds
        deadline = started + min(math.inf if left is None else left, most)
        metadata = {
            name: value
            for name, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        name = name_request(metadata.get(REQUEST_ID, ""))
        return Call(started, deadline, metadata, {"request_id": name})

    async def _answer(
        self,
        context: "grpc.aio.ServicerContext[bytes, bytes]",
        call: Call,
        method: Method,
        access: Access,
    ) -> bytes:
        client = client_at(peer_host(context.peer()))
        if self._keys is not None and access != "open":
            owner = self._keys.owner(*call.api_keys)
            call.fields["key"] = owner
            self._keys.count(owner)
            client = self._keys.client(owner)
            if access == "admin":
                self._keys.check_admin(owner)
        current_client.set(client)
        timeout = asyncio.timeout(call.deadline - time.monotonic())
        try:
            async with timeout:
                if access == "open":
                    return await method(b"", call)
                async with self._received(context, call) as content:
                    return await method(content, call)
        except TimeoutError:
            if timeout.expired():
                raise DeadlineError from None
            raise

    @asynccontextmanager
    async def _received(
        self, context: "grpc.aio.ServicerContext[bytes, bytes]", call: Call
    ) -> AsyncIterator[bytes]:
        """Receive the message of a call, whose bytes the buffer holds until the answer.

        Raises:
            BusyError: if the buffer stays full.
            SlowClientError: if the message does not arrive in time.
            InputError: if the client sends none.
        """
        held, client = self.max_message_bytes, current_client.get().name
        end = call.started + self._shared.settings.receive_seconds
        try:
            async with asyncio.timeout(end - time.monotonic()):
                await self._buffer.reserve(held, client)
        except TimeoutError:
            raise full_buffer() from None
        try:
            content = await self._read(context, end)
            self.accepted += 1
            context.add_done_callback(lambda _: self._leave(call))
            self._buffer.release(held - len(content), client)
            held = len(content)
            yield content
        finally:
            self._buffer.release(held, client)

    async def _read(self, context: "grpc.aio.ServicerContext[bytes, bytes]", end: float) -> bytes:
        try:
            async with asyncio.timeout(end - time.monotonic()):
                content: bytes = await context.read()
        except TimeoutError:
            raise late_request(self._shared.settings.receive_seconds) from None
        if content is grpc.aio.EOF:
            raise InputError("Expected a message, got none.", "Send one message in each call.")
        return content

    def _leave(self, call: Call) -> None:
        self.accepted -= 1
        for release in call.releases:
            release()

    def _end(self, path: str, call: Call, code: grpc.StatusCode, *, is_probe: bool) -> None:
        """Count and log a call."""
        self._shared.metrics.responses.labels(path, code.name, call.model).inc()
        call.fields["seconds"] = round(time.monotonic() - call.started, 6)
        is_quiet = is_probe and code is grpc.StatusCode.OK
        level = logging.DEBUG if is_quiet else logging.INFO
        logger.log(level, "gRPC %s %s", path, code.name, extra={"fields": call.fields})


def refusal_of(error: Exception) -> Refusal:
    """Return the status and the text of an error; log it if the server is at fault."""
    match error:
        case RequestValidationError():
            return Refusal(grpc.StatusCode.INVALID_ARGUMENT, describe(error))
        case AftexportError():
            if isinstance(error, EngineError | StorageError):
                _problems.error("%s", error)
            code = _CODES.get(status_of(error), grpc.StatusCode.INTERNAL)
            after = error.retry_after if isinstance(error, RefusedError) else None
            return Refusal(code, str(error), after)
        case _:
            _problems.error("a call failed", exc_info=error)
            return Refusal(grpc.StatusCode.INTERNAL, "The server failed. See its log.")
