"""A limit on the time in which a client reads nothing of its answer."""

import asyncio


class UnreadAnswerTimeout:
    """A timer that aborts a connection whose client has stopped reading.

    Args:
        transport: connection of the client.
        seconds: maximum time in which the client reads nothing.
    """

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        self._transport = transport
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to wait for the client to read."""
        unread_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._seconds, self._check, unread_bytes)

    def start_if_closing(self) -> None:
        """Begin to wait if the connection is closing; uvicorn waits for its end."""
        if self._transport.is_closing() and self._timer is None:
            self.start()

    def cancel(self) -> None:
        """End the wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, unread_bytes: int) -> None:
        if self._transport.get_write_buffer_size() < unread_bytes:
            self.start()
        else:
            self._transport.abort()  # close() would wait until everything is read
