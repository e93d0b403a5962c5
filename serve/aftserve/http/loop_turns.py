"""Turns of work on the event loop, between which connections are served."""

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar
from weakref import WeakValueDictionary

from aftserve.http.clients import current_client

T = TypeVar("T")

_TURN_SECONDS = 0.001


class LoopTurns:
    """Turns of requests whose work takes long, such as parsing, tokenizing and writing JSON.

    After a millisecond of turns the event loop serves all connections. Clients take turns, and the
    request of a client that has waited longest is its next. So hundreds of requests of one client
    delay others no longer than a few do.

    Attributes:
        large: lock for work that also takes much memory.
    """

    def __init__(self) -> None:
        self.large = asyncio.Lock()
        self._lock = asyncio.Lock()
        self._own_locks = WeakValueDictionary[str, asyncio.Lock]()
        self._end = 0.0

    async def take(self) -> None:
        """Wait for a turn, which is the work of the caller until it awaits something."""
        # One request of each client waits for the lock of all.
        own = self._own_locks.setdefault(current_client.get().name, asyncio.Lock())
        async with own, self._lock:
            if time.monotonic() > self._end:
                await asyncio.sleep(0)
                self._end = time.monotonic() + _TURN_SECONDS

    async def run(self, steps: Generator[None, None, T]) -> T:
        """Run work to its end, and return its result.

        Args:
            steps: the work, which yields at least once in about a millisecond.
        """
        while True:
            await self.take()
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
