"""The clients among which the server shares its queue and its buffers."""

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address

_SITE_BITS = 64
"""Bits of an IPv6 address that a network assigns; a client chooses the others freely."""


def _spend_freely(tokens: int, seconds: float) -> None:
    """Allow any amount of work."""


@dataclass(frozen=True)
class Client:
    """One client, on any number of connections.

    Attributes:
        name: owner of its API key, or its address for a server without keys.
        spend: function that counts tokens and predicted seconds of accepted documents. It raises
            BusyError if the client has used them up.
    """

    name: str
    spend: Callable[[int, float], None] = _spend_freely


_NO_CLIENT = Client("")
current_client: ContextVar[Client] = ContextVar("current_client", default=_NO_CLIENT)
"""The client whose request the current task answers."""


def client_at(host: str) -> Client:
    """Return the client at an address; all addresses of an IPv6 network of 64 bits are one.

    Args:
        host: the address of the connection; empty for a Unix socket. A header such as
            X-Forwarded-For would let one client pass for many.
    """
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
    """A buffer whose bytes the clients share.

    A client may hold as many bytes as it leaves free. So one client takes half of the buffer, two
    take a third each, and there is always room for another. The only request of a client may take
    all free bytes.

    Args:
        max_bytes: maximum number of bytes.

    Attributes:
        max_bytes: maximum number of bytes.
        held: number of bytes that all clients hold.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held_by = Counter[str]()
        self.held = 0

    def has_room(self, client: str, count: int, own: int = 0) -> bool:
        """Return whether a request of a client may hold further bytes.

        Args:
            client: name of the client.
            count: number of further bytes.
            own: number of bytes that the request holds already.
        """
        free = self.max_bytes - self.held - count
        held = self._held_by[client]  # a Counter stores no names that are only read
        return free >= 0 and (held == own or held + count <= free)

    def add(self, client: str, count: int) -> None:
        """Count further bytes of a client; a negative number gives bytes back."""
        self.held += count
        self._held_by[client] += count
        if not self._held_by[client]:
            del self._held_by[client]  # clients without bytes take no memory
