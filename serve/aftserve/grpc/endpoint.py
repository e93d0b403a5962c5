"""The port of gRPC, from its start to its end, and the standard health service."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from aftexport.errors import InputError, UsageError
from aftserve.api.api_keys import Keys
from aftserve.errors import BusyError, NotFoundError
from aftserve.grpc.addresses import free_addresses
from aftserve.grpc.call import Call, Caller, Rules
from aftserve.grpc.methods import Methods
from aftserve.grpc.wire_types import SERVICE
from aftserve.http.clients import SharedBytes, current_client
from aftserve.http.tls import ServerCertificate
from aftserve.serving.repository import ModelRepository

logger = logging.getLogger(__name__)
_grpc_logger = logging.getLogger("grpc._cython.cygrpc")

_HEALTH = "grpc.health.v1.Health"
_MAX_WATCHES = 100
"""Maximum number of ``Watch`` calls at a time, which need no API key."""
_STATUS = health_pb2.HealthCheckResponse
_POLL_SECONDS = 0.1
_OTHER_CALLS_SECONDS = 1.0
"""Time at the end for other calls than accepted ones, after the last of these."""
_MAX_STREAMS = 128
"""Maximum number of calls at a time on one connection."""
_UNREAD_BYTES = 1 << 16
"""Maximum bytes of a message that gRPC takes before the call reads it."""
_MAX_ATTEMPTS = 16
_NO_LIMIT = 0


class Endpoint:
    """The server of gRPC, in the running event loop."""

    def __init__(
        self,
        models: ModelRepository,
        keys: Keys | None,  # None to serve everyone
        certificate: ServerCertificate | None,  # None to speak in plain text
    ) -> None:
        self._settings = models.settings
        self._health = Health(models)
        self._caller = Caller(models.shared, keys)
        self._handlers = [one.handler(self._caller) for one in (Methods(models), self._health)]
        self._certificate = certificate
        self._addresses: list[str] = []

    def _make_server(self) -> grpc.aio.Server:
        ping_milliseconds = int(1000 * self._settings.grpc_ping_seconds)
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._caller.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
                ("grpc.http2.bdp_probe", 0),  # it would raise the bytes of unread messages
                ("grpc.so_reuseport", 0),  # a port that is taken is an error
                ("grpc.keepalive_time_ms", ping_milliseconds),
                ("grpc.keepalive_timeout_ms", ping_milliseconds),
                ("grpc.http2.ping_timeout_ms", ping_milliseconds),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", _NO_LIMIT),
                (
                    "grpc.http2.min_ping_interval_without_data_ms",
                    int(1000 * self._settings.grpc_min_ping_seconds),
                ),
            ]
        )
        server.add_generic_rpc_handlers(self._handlers)
        return server

    def bind(self, hosts: Sequence[str], port: int) -> None:
        """Bind the port at each host.

        Raises:
            UsageError: if an address or the port is not available.
        """
        # port: 0 for a free port, the same at every host
        for attempt in range(_MAX_ATTEMPTS):
            self._addresses = free_addresses(hosts, port)
            self._server = self._make_server()  # a server keeps the addresses it has bound
            try:
                for address in self._addresses:
                    self._add(address)
            except RuntimeError as error:  # taken since it was found to be free
                if port or attempt == _MAX_ATTEMPTS - 1:
                    raise UsageError(
                        f"The server cannot listen for gRPC at {address}.",
                        "Choose another port by --grpc-port.",
                    ) from error
            else:
                self._caller.port = int(self._addresses[0].rpartition(":")[2])
                return

    def _add(self, address: str) -> None:
        if self._certificate is None:
            self._server.add_insecure_port(address)
        else:
            self._server.add_secure_port(address, self._credentials(self._certificate))

    def _credentials(self, certificate: ServerCertificate) -> grpc.ServerCredentials:
        """Return credentials that follow the files of the certificate."""

        def current() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([certificate.pem])

        return grpc.dynamic_ssl_server_credentials(current(), current)

    async def start(self) -> None:
        """Begin to accept calls."""
        _grpc_logger.addFilter(_is_fault)
        await self._server.start()
        logger.info("gRPC running on %s", " and ".join(self._addresses))

    async def stop(self, seconds: float, is_forced: Callable[[], bool]) -> None:
        """Refuse new calls, and wait for the answers to accepted calls."""
        # seconds: maximum time for these answers; clients have half of it to read them
        logger.info("gRPC refuses new calls")
        self._health.stop()
        stopping = asyncio.create_task(self._server.stop(seconds))
        caller, started = self._caller, time.monotonic()
        last = started
        while not (await asyncio.wait({stopping}, timeout=_POLL_SECONDS))[0]:
            now = time.monotonic()
            if caller.running or (caller.unread and now - started < seconds / 2):
                last = now
            # Other calls: answers that are not read, or a message that has not arrived.
            if is_forced() or now - last >= _OTHER_CALLS_SECONDS:
                await self._server.stop(None)


class Health:
    """The readiness of the server, for the server as a whole and for the protocol's service.

    No call waits for another: a client that does not read its answers holds up only itself.
    """

    def __init__(self, models: ModelRepository) -> None:
        self._models = models
        self._is_stopping = False
        self._watches = SharedBytes(_MAX_WATCHES)

    def handler(self, caller: Caller) -> grpc.GenericRpcHandler:
        """Return the handler of the service, whose calls ``caller`` runs."""
        check, watch = Rules("open", is_probe=True), Rules("open", is_probe=True, is_stream=True)
        return grpc.method_handlers_generic_handler(
            _HEALTH,
            {
                "Check": caller.handler(f"/{_HEALTH}/Check", self._check, check),
                "Watch": caller.handler(f"/{_HEALTH}/Watch", self._watch, watch),
            },
        )

    def stop(self) -> None:
        """Report not serving from now on, and end each ``Watch`` after this status."""
        self._is_stopping = True

    async def _check(self, content: bytes, call: Call) -> bytes:
        """Return the status of a service."""
        service = _service(content)
        status = self._status(service)
        if status == _STATUS.SERVICE_UNKNOWN:
            raise NotFoundError(
                f"Expected the service {SERVICE} or none, got {service[:100]!r}.",
                "Leave the service empty.",
            )
        return _response(status)

    async def _watch(self, content: bytes, call: Call) -> bytes:
        """Send the status of a service, and each change of it."""
        service = _service(content)
        client = current_client.get().name
        if not self._watches.has_room(client, 1):
            raise BusyError(
                f"Expected at most {_MAX_WATCHES} Watch calls at a time, which clients share.",
                "Call Check instead.",
            )
        self._watches.add(client, 1)
        try:
            await self._send_changes(service, call)
        finally:
            self._watches.add(client, -1)
        return b""

    async def _send_changes(self, service: str, call: Call) -> None:
        last = None
        while True:
            is_last, status = self._is_stopping, self._status(service)
            if status != last:
                last = status
                await call.send(_response(status))
            if is_last:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _status(self, service: str) -> Any:
        if service not in ("", SERVICE):
            return _STATUS.SERVICE_UNKNOWN
        is_ready = self._models.ready and not self._is_stopping
        return _STATUS.SERVING if is_ready else _STATUS.NOT_SERVING


def _service(content: bytes) -> str:
    """Return the service that a request names."""
    try:
        service: str = health_pb2.HealthCheckRequest.FromString(content).service
    except DecodeError:
        raise InputError(
            "Expected a message grpc.health.v1.HealthCheckRequest, got bytes that are not one.",
            "Generate the client from the definition of the health service.",
        ) from None
    return service


def _response(status: Any) -> bytes:
    content: bytes = _STATUS(status=status).SerializeToString()
    return content


def _is_fault(record: logging.LogRecord) -> bool:
    """Return whether a record is more than a client that left before it read its answer."""
    error = record.exc_info[1] if record.exc_info else None
    return not (
        isinstance(error, grpc.aio.InternalError)
        and str(error).startswith('Failed "execute_batch"')
    )
