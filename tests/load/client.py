"""A client with little overhead, so that measurements show the server."""

import asyncio
from collections.abc import Mapping
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
    head: str  # status line and headers, with names and values in lower case
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        """The headers by their names."""
        lines = (line.partition(":") for line in self.head.split("\r\n")[1:])
        return {name: value.strip() for name, _, value in lines if name}


class Connection:
    """A connection to a server, which reopens after it was closed."""

    def __init__(self, address: str) -> None:
        place = urlsplit(address)
        self._host, self._port = place.hostname, place.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        """Connect, unless it is connected already."""
        if self._streams is None:
            try:
                self._streams = await asyncio.open_connection(self._host, self._port, limit=_LIMIT)
            except ConnectionResetError as error:  # the listener closed before it accepted
                raise ConnectionRefusedError from error

    async def post(self, path: str, body: bytes, **headers: str) -> Response:
        """Send a request of JSON; see ``exchange``."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.exchange("POST", path, body, names)

    async def exchange(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Response:
        """Send a request and wait for the response; a cancellation closes the connection."""
        await self.open()
        assert self._streams is not None
        reader, writer = self._streams
        complete = False
        try:
            writer.write(_request(method, path, body, headers or {}))
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            _, found, rest = head.partition("\r\ncontent-length:")
            if found:
                content = await reader.readexactly(int(rest.split(maxsplit=1)[0]))
            else:
                content = await _read_chunks(reader)
            complete = "connection: close" not in head
            return Response(int(head.split(maxsplit=2)[1]), head, content)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ConnectionEndedError from error
        finally:
            if not complete:
                self.close()

    async def break_off(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send the first half of a request, and close the connection."""
        await self.open()
        assert self._streams is not None
        content = _request("POST", path, body, headers)
        with suppress(ConnectionError):  # the server may have refused the request by its head
            self._streams[1].write(content[: len(content) - len(body) // 2 - 1])
            await self._streams[1].drain()
        self.close()

    def close(self) -> None:
        """Close the connection at once."""
        if self._streams is not None:
            with suppress(OSError):
                self._streams[1].transport.abort()
            self._streams = None


def _request(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    fields = {
        "Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body)),
    }  # fmt: skip
    lines = [f"{name}: {value}" for name, value in {**fields, **headers}.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + body


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    """Read a body of ``Transfer-Encoding: chunked``."""
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)
