"""The standard health service, ``grpc.health.v1``."""

import asyncio
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from aftexport.errors import InputError
from aftserve.errors import BusyError, NotFoundError
from aftserve.grpc.call import Call, Caller, Rules
from aftserve.grpc.wire_types import SERVICE
from aftserve.http.clients import SharedBytes, current_client
from aftserve.serving.repository import ModelRepository

_HEALTH = "grpc.health.v1.Health"
_POLL_SECONDS = 0.1
_MAX_WATCHES = 100
"""Maximum number of ``Watch`` calls at a time, which need no API key."""
_STATUS = health_pb2.HealthCheckResponse


class Health:
    """The readiness of the server, for the server as a whole and for the protocol's service.

    No call waits for another: a client that does not read its answers holds up only itself.

    Args:
        models: the models of the server.
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
