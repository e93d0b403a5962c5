"""HTTP/1.1, with a bound on the time a client takes to ask."""

import asyncio
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """Closes a connection on which a request's headers do not arrive in time.

    uvicorn bounds the time between two requests, not that of the first line to the last
    header. Bodies are the application's to bound: it can say why.
    """

    def __init__(self, *args: Any, header_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_seconds = header_seconds
        self._waiting: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, seconds: float) -> Any:
        """The class, for a server whose clients have so long."""
        return partial(cls, header_seconds=seconds)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Waits for the rest of the headers, if they are not complete."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Waits for the next request, as long as uvicorn keeps the connection."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        super().connection_lost(exc)
        self._rest()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._rest()
        elif self._waiting is None and not self.transport.is_closing():
            self._waiting = self.loop.call_later(self._header_seconds, self._overdue)

    def _rest(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _overdue(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n")
            self.transport.close()
