"""A probe for clients that ended their side of a connection: do they still wait for an answer?"""

import asyncio
import socket
from collections.abc import Callable

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBE_SECONDS = 1.0
_ANSWER_SECONDS = 0.1


class DepartureProbe:
    """A timer that sends interim responses, and drops the connection once one is refused.

    A client that closes its socket and one that only ends its side look the same to the server.
    After a closed socket, the client's system answers the next bytes with a reset. Every client of
    HTTP/1.1 must skip interim responses (RFC 9110, 15.2).

    Args:
        transport: connection of the client.
        may_send: predicate, true while a request of HTTP/1.1 waits for its answer.
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
        # The loop reads nothing after the end of the client's side, and does not see a reset.
        connection = self._transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        else:
            self._next = self._loop.call_later(_PROBE_SECONDS, self._send)
