"""The sockets that the server listens on."""

import errno
import socket
import sys
from collections.abc import Sequence
from typing import Any

_MAX_ATTEMPTS = 16
_ANY_IPV6 = "::"
_Address = tuple[socket.AddressFamily, Any]


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket for each address of a host, all to one port; they do not listen yet.

    ``::`` takes clients of IPv4 too, if the system can do so.

    Args:
        host: name or address.
        port: port; 0 for a free one.

    Returns:
        At least one socket.

    Raises:
        OSError: if the host is unknown, or an address or the port is not available.
        ValueError: if the host is not a valid name.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses: list[_Address] = list(dict.fromkeys((one[0], one[4]) for one in found))
    for attempt in range(_MAX_ATTEMPTS):
        try:
            return _bind_all(addresses)
        except OSError as error:
            # The port that was free at one address may be taken at the next.
            if port or error.errno != errno.EADDRINUSE or attempt == _MAX_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def urls(listeners: Sequence[socket.socket], scheme: str = "http") -> list[str]:
    """Return the URL of each socket; a socket of IPv6 and IPv4 has two."""
    found = list[str]()
    for listener in listeners:
        host, port, *_ = listener.getsockname()
        if listener.family is not socket.AF_INET6:
            found.append(f"{scheme}://{host}:{port}")
            continue
        found.append(f"{scheme}://[{host}]:{port}")
        if not listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
            found.append(f"{scheme}://0.0.0.0:{port}")
    return found


def accept_waiting(listener: socket.socket, max_connections: int) -> list[socket.socket]:
    """Accept the connections that the system holds for a non-blocking socket.

    Args:
        listener: the listening socket.
        max_connections: maximum number of connections.
    """
    accepted = list[socket.socket]()
    for _ in range(max_connections):
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:
            continue
        except OSError:  # none is left, or no file may be opened
            break
        connection.setblocking(False)
        accepted.append(connection)
    return accepted


def _bind_all(addresses: Sequence[_Address]) -> list[socket.socket]:
    listeners = list[socket.socket]()
    failure: OSError | None = None
    try:
        for family, address in addresses:
            both = address[0] == _ANY_IPV6 and len(addresses) == 1 and socket.has_dualstack_ipv6()
            if listeners:
                address = (address[0], listeners[0].getsockname()[1], *address[2:])
            try:
                listeners.append(_bind_one(family, address, both=both))
            except OSError as error:
                # A name such as localhost may have an address of a family that is switched off.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                failure = error
        if failure is not None and not listeners:
            raise failure
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _bind_one(
    family: socket.AddressFamily, address: tuple[Any, ...], *, both: bool
) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there, it would let others take the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
