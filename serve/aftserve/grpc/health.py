"""The standard health service, ``grpc.health.v1``."""

import asyncio

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio

from aftserve.grpc.wire_types import SERVICE
from aftserve.observability.health import Health

_SECONDS = 0.1


class HealthServicer(aio.HealthServicer):  # type: ignore[misc]
    """The readiness of the server, for the server as a whole and for the protocol's service.

    Args:
        health: the health of the server.
    """

    def __init__(self, health: Health) -> None:
        super().__init__()
        self._health = health

    async def Check(self, request: object, context: object) -> object:  # noqa: N802
        """Return the status of a service."""
        await self.publish()
        return await super().Check(request, context)

    async def publish(self) -> None:
        """Set the current status, which clients may watch."""
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if self._health.ready else status.NOT_SERVING
        for name in ("", SERVICE):
            await self.set(name, value)

    async def publish_changes(self) -> None:
        """Set the status at every change, until cancelled."""
        last = None
        while True:
            if self._health.ready is not last:
                last = self._health.ready
                await self.publish()
            await asyncio.sleep(_SECONDS)
