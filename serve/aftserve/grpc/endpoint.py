"""The port of gRPC, from its start to its end."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from aftexport.errors import UsageError
from aftserve.api.api_keys import Keys
from aftserve.grpc.call import Caller
from aftserve.grpc.health import HealthServicer
from aftserve.grpc.methods import Methods
from aftserve.http.tls import ServerCertificate
from aftserve.service import Service

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


class Endpoint:
    """The server of gRPC, in the running event loop.

    Args:
        service: the service that answers.
        keys: the API keys; None to serve everyone.
        certificate: certificate for TLS; None to speak in plain text.
    """

    def __init__(
        self, service: Service, keys: Keys | None, certificate: ServerCertificate | None
    ) -> None:
        settings = service.settings
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", settings.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a port that is taken is an error
            ]
        )
        self._health = HealthServicer(service.health)
        self._certificate = certificate
        self._server.add_generic_rpc_handlers([Methods(service).handler(Caller(service, keys))])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._places: list[str] = []

    def bind(self, hosts: Sequence[str], port: int) -> None:
        """Bind the port at each host.

        Args:
            hosts: names or addresses.
            port: port; 0 for a free one, the same at every host.

        Raises:
            UsageError: if an address or the port is not available.
        """
        for host in hosts:
            place = f"[{host}]" if ":" in host else host
            try:
                port = self._add(f"{place}:{port}")
            except RuntimeError as error:
                raise UsageError(
                    f"The server cannot listen for gRPC at {host}, port {port}.",
                    "Choose another port by --grpc-port.",
                ) from error
            self._places.append(f"{place}:{port}")

    def _add(self, place: str) -> Any:
        if self._certificate is None:
            return self._server.add_insecure_port(place)
        return self._server.add_secure_port(place, self._credentials(self._certificate))

    def _credentials(self, certificate: ServerCertificate) -> grpc.ServerCredentials:
        """Return credentials that follow the files of the certificate."""

        def current() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([certificate.pem])

        return grpc.dynamic_ssl_server_credentials(current(), current)

    async def start(self) -> None:
        """Begin to accept calls."""
        await self._server.start()
        self._publishing = asyncio.create_task(self._health.publish_changes())
        logger.info("gRPC running on %s", " and ".join(self._places))

    async def stop(self, seconds: float, is_forced: Callable[[], bool]) -> None:
        """Refuse new calls, and wait for the answers to accepted calls.

        Args:
            seconds: maximum time for these answers.
            is_forced: predicate, true once the server must end at once.
        """
        logger.info("gRPC refuses new calls")
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self._server.stop(seconds))
        while not (await asyncio.wait({stopping}, timeout=_POLL_SECONDS))[0]:
            if is_forced():
                await self._server.stop(None)
        self._publishing.cancel()
        with suppress(asyncio.CancelledError):
            await self._publishing
