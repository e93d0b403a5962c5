"""The clients among which the server shares its queue, its buffers and its event loop."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import TypeVar
from weakref import WeakValueDictionary

_SITE_BITS = 64
"""Bits of an IPv6 address that a network assigns; a client chooses the others freely."""
_MAX_KNOWN_ADDRESSES = 1024
T = TypeVar("T")
_TURN_SECONDS = 0.001


def _spend_freely(tokens: int, seconds: float) -> None:
    """Allow any amount of work."""


@dataclass(frozen=True)
class Client:
    """One client, on any number of connections."""

    name: str
    """Owner of its API key, or its address for a server without keys."""
    spend: Callable[[int, float], None] = _spend_freely
    """Counts tokens and predicted seconds; BusyError if the client has used them up."""


_NO_CLIENT = Client("")
current_client: ContextVar[Client] = ContextVar("current_client", default=_NO_CLIENT)
"""The client whose request the current task answers."""


@lru_cache(_MAX_KNOWN_ADDRESSES)
def client_at(host: str) -> Client:
    """Return the client at an address, empty for a Unix socket; an IPv6 /64 is one client."""
    # A header such as X-Forwarded-For would let one client pass for many.
    try:
        address = ip_address(host)
    except ValueError:
        return Client(host or "unix")
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return Client(str(address.ipv4_mapped))
        return Client(str(IPv6Network((int(address), _SITE_BITS), strict=False)))
    return Client(str(address))


class SharedBytes:
    """A buffer whose bytes the clients share."""

    # A client may hold as many bytes as it leaves free. So one client takes half of the buffer, two
    # take a third each, and there is always room for another. The only request of a client may take
    # all free bytes.

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held_by = Counter[str]()
        self.held = 0

    def has_room(self, client: str, count: int, own: int = 0) -> bool:
        """Return whether a request of a client may hold further bytes."""
        free = self.max_bytes - self.held - count
        held = self._held_by[client]  # a Counter stores no names that are only read
        return free >= 0 and (held == own or held + count <= free)

    def add(self, client: str, count: int) -> None:
        """Count further bytes of a client; a negative number gives bytes back."""
        self.held += count
        self._held_by[client] += count
        if not self._held_by[client]:
            del self._held_by[client]  # clients without bytes take no memory


class LoopTurns:
    """Turns of requests whose work takes long, such as parsing, tokenizing and writing JSON."""

    # After a millisecond of turns the event loop serves all connections. Clients take turns, and
    # the request of a client that has waited longest is its next. So hundreds of requests of one
    # client delay others no longer than a few do.

    def __init__(self) -> None:
        self.large = asyncio.Lock()  # for work that also takes much memory
        self._lock = asyncio.Lock()
        self._own_locks = WeakValueDictionary[str, asyncio.Lock]()
        self._end = 0.0

    async def take(self) -> None:
        """Wait for a turn, which is the work of the caller until it awaits something."""
        if not self._own_locks and time.monotonic() <= self._end:
            return  # no other request waits
        # One request of each client waits for the lock of all.
        own = self._own_locks.setdefault(current_client.get().name, asyncio.Lock())
        async with own, self._lock:
            if time.monotonic() > self._end:
                await asyncio.sleep(0)
                self._end = time.monotonic() + _TURN_SECONDS

    async def run(self, steps: Generator[None, None, T]) -> T:
        """Return the result of work that yields at least once in about a millisecond."""
        while True:
            await self.take()
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
