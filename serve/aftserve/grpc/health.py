"""The standard health service, ``grpc.health.v1``."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from aftserve.grpc.wire_types import SERVICE
from aftserve.serving.repository import ModelRepository

_POLL_SECONDS = 0.1
_MAX_WATCHES = 100
"""Maximum number of ``Watch`` calls at a time, which need no API key."""
_STATUS = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The readiness of the server, for the server as a whole and for the protocol's service.

    No call waits for another: a client that does not read its answers holds up only itself.

    Args:
        models: the models of the server.
    """

    def __init__(self, models: ModelRepository) -> None:
        self._models = models
        self._is_stopping = False
        self._watches = 0

    def stop(self) -> None:
        """Report not serving from now on, and end each ``Watch`` after this status."""
        self._is_stopping = True

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the status of a service."""
        status = self._status(request.service)
        if status == _STATUS.SERVICE_UNKNOWN:
            text = f"Expected the service {SERVICE} or none, got {request.service[:100]!r}."
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return _STATUS(status=status)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """Send the status of a service, and each change of it."""
        if self._watches >= _MAX_WATCHES:
            text = f"Expected at most {_MAX_WATCHES} Watch calls at a time. Call Check instead."
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._watches += 1
        try:
            await self._send_changes(request.service, context)
        finally:
            self._watches -= 1

    async def _send_changes(self, service: str, context: Any) -> None:
        last = None
        while True:
            is_last, status = self._is_stopping, self._status(service)
            if status != last:
                last = status
                await context.write(_STATUS(status=status))
            if is_last:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _status(self, service: str) -> Any:
        if service not in ("", SERVICE):
            return _STATUS.SERVICE_UNKNOWN
        is_ready = self._models.ready and not self._is_stopping
        return _STATUS.SERVING if is_ready else _STATUS.NOT_SERVING
