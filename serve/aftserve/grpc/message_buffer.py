"""The share of memory that the messages of all calls hold together."""

import asyncio
from collections import deque


class MessageBuffer:
    """The bytes of all messages, each from its arrival to its answer.

    Args:
        max_bytes: maximum number of bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._waiting = deque[tuple[asyncio.Future[None], int]]()

    async def reserve(self, count: int) -> None:
        """Reserve bytes, in the order of the callers; wait until they are free.

        Args:
            count: number of bytes, at most the maximum of the buffer.
        """
        if self._bytes + count <= self._max_bytes:
            self._bytes += count
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, count))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the bytes came at the same moment
                self.release(count)
            raise

    def release(self, count: int) -> None:
        """Give bytes back, to the callers that wait for them.

        Args:
            count: number of bytes that were reserved.
        """
        self._bytes -= count
        while self._waiting:
            turn, wanted = self._waiting[0]
            if not turn.cancelled():
                if self._bytes + wanted > self._max_bytes:
                    return
                self._bytes += wanted
                turn.set_result(None)
            self._waiting.popleft()
