"""The requests that hold a model, counted until their responses have ended."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Holders:
    """A count of the requests that hold a model, and of the work for them."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def add(self) -> Callable[[], None]:
        """Count a holder; it calls the returned function once, at its end."""
        self._count += 1
        self._none.clear()
        return self._release

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count a holder within the block."""
        release = self.add()
        try:
            yield
        finally:
            release()

    async def released(self) -> None:
        """Wait until the last holder has ended."""
        while self._count:
            await self._none.wait()

    def _release(self) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()
