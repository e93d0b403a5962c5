"""A client with little overhead, so that measurements show the server."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

_LIMIT = 1 << 20


class ConnectionEndedError(Exception):
    """The server closed the connection before it answered."""


@dataclass(frozen=True)
class Response:
    """A response of the server."""

    status: int
    body: bytes


class Connection:
    """A connection to a server, which reopens after it was closed.

    Args:
        address: ``http://host:port``.
    """

    def __init__(self, address: str) -> None:
        place = urlsplit(address)
        self._host, self._port = place.hostname, place.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        """Connect, unless it is connected already.

        Raises:
            ConnectionRefusedError: if the server does not listen.
        """
        if self._streams is None:
            try:
                self._streams = await asyncio.open_connection(self._host, self._port, limit=_LIMIT)
            except ConnectionResetError as error:  # the listener closed before it accepted
                raise ConnectionRefusedError from error

    async def post(self, path: str, body: bytes, **headers: str) -> Response:
        """Send a request and wait for the response; a cancellation closes the connection.

        Raises:
            ConnectionRefusedError: if the server does not listen.
            ConnectionEndedError: if the connection ends before the whole response.
        """
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json",
                 f"Content-Length: {len(body)}"]  # fmt: skip
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.open()
        assert self._streams is not None
        reader, writer = self._streams
        complete = False
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = head.partition("content-length:")[2].split(maxsplit=1)[0]
            content = await reader.readexactly(int(length))
            complete = "connection: close" not in head
            return Response(int(head.split(maxsplit=2)[1]), content)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ConnectionEndedError from error
        finally:
            if not complete:
                self.close()

    def close(self) -> None:
        """Close the connection at once."""
        if self._streams is not None:
            with suppress(OSError):
                self._streams[1].transport.abort()
            self._streams = None
