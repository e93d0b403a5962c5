"""Whether a client that has ended its side of a connection still waits for an answer."""

import asyncio
import socket
from collections.abc import Callable

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBE_SECONDS = 1.0
_ANSWER_SECONDS = 0.1


class DepartureProbe:
    """Sends interim responses until the client's system refuses one, and then drops the connection.

    The end of a client's side looks the same whether it has closed its socket or goes on reading.
    Only what is sent to it tells. Every client of HTTP/1.1 skips interim responses.

    Args:
        transport: connection of the client.
        may_send: whether an interim response may be sent, as a request of HTTP/1.1 waits for its
            answer.
    """

    def __init__(self, transport: asyncio.Transport, may_send: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_send = may_send
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(_PROBE_SECONDS, self._send)

    def cancel(self) -> None:
        """Send no more."""
        self._next.cancel()

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        if self._may_send():
            self._transport.write(_INTERIM)
        self._next = self._loop.call_later(_ANSWER_SECONDS, self._look)

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        # Nothing is read any more, so that the loop does not hear of a reset.
        connection = self._transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        else:
            self._next = self._loop.call_later(_PROBE_SECONDS, self._send)
