"""The share of memory that the messages of all calls hold together."""

import asyncio
from collections import deque

from aftserve.http.clients import SharedBytes


class MessageBuffer:
    """The bytes of all messages, each from its arrival to its answer; see ``SharedBytes``.

    Args:
        max_bytes: maximum number of bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._bytes = SharedBytes(max_bytes)
        self._waiting = deque[tuple[asyncio.Future[None], int, str]]()

    async def reserve(self, count: int, client: str) -> None:
        """Reserve bytes, in the order of the callers of a client; wait until they are free.

        Args:
            count: number of bytes, at most the maximum of the buffer.
            client: name of the client that shares the buffer with others.
        """
        if self._bytes.has_room(client, count):
            self._bytes.add(client, count)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, count, client))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the bytes came at the same moment
                self.release(count, client)
            raise

    def release(self, count: int, client: str) -> None:
        """Give bytes back, to the callers that wait for them.

        Args:
            count: number of bytes that were reserved.
            client: name of the client that reserved them.
        """
        self._bytes.add(client, -count)
        for _ in range(len(self._waiting)):
            turn, wanted, other = self._waiting.popleft()
            if turn.cancelled():
                continue
            if self._bytes.has_room(other, wanted):
                self._bytes.add(other, wanted)
                turn.set_result(None)
            else:
                self._waiting.append((turn, wanted, other))
