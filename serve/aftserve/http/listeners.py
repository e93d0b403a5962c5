"""The sockets that the server listens on."""

import errno
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from aftexport.errors import UsageError

_MAX_ATTEMPTS = 16
_ANY_IPV6 = "::"
_UNIX_MODE = 0o666
"""Permissions of a Unix socket, as in uvicorn: those of its folder decide who may connect."""
_UNIX: int | None = getattr(socket, "AF_UNIX", None)
"""The family of Unix sockets; None on Windows, where Python lacks them."""
_Address = tuple[socket.AddressFamily, Any]


def bind(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Bind a socket for each address of the hosts, all to one port; they do not listen yet.

    ``::`` takes clients of IPv4 too, if the system can do so and no host is of IPv4.

    Args:
        hosts: names or addresses.
        port: port; 0 for a free one.

    Returns:
        At least one socket for each host.

    Raises:
        UsageError: if a host is unknown, or an address or the port is not available.
    """
    found = {host: _addresses(host, port) for host in hosts}
    for attempt in range(_MAX_ATTEMPTS):
        try:
            return _bind_hosts(found, port)
        except UsageError as error:
            # The port that was free at one address may be taken at the next.
            is_taken = getattr(error.__cause__, "errno", None) == errno.EADDRINUSE
            if port or not is_taken or attempt == _MAX_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def bind_unix(path: Path) -> socket.socket:
    """Bind a Unix socket; it does not listen yet. A socket that a dead process left is replaced.

    Raises:
        UsageError: if another process listens at the path, or it cannot be bound.
    """
    if _UNIX is None:
        raise UsageError(
            f"--uds {path}: this system has no Unix sockets.", "Use --host and --port."
        )
    listener = socket.socket(_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _has_listener(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(_UNIX_MODE)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"--uds {path}: the server cannot listen there ({error.strerror or error}).",
            "Name a path without a file, in a folder that the server's user may write.",
        ) from error
    return listener


def is_unix(listener: socket.socket) -> bool:
    """Return whether a socket is a Unix socket."""
    return listener.family == _UNIX


def close_all(listeners: Sequence[socket.socket]) -> None:
    """Close sockets, and remove the paths of Unix sockets."""
    remove_paths(listeners)
    for listener in listeners:
        listener.close()


def remove_paths(listeners: Sequence[socket.socket]) -> None:
    """Remove the paths of Unix sockets, which stay open.

    After a socket is closed, another server may bind its path, and would lose it.
    """
    for listener in filter(is_unix, listeners):
        with suppress(OSError):  # another process may have removed it
            Path(listener.getsockname()).unlink()


def urls(listeners: Sequence[socket.socket], scheme: str = "http") -> list[str]:
    """Return the URL of each socket; a socket of IPv6 and IPv4 has two."""
    found = list[str]()
    for listener in listeners:
        if is_unix(listener):
            found.append(f"unix:{listener.getsockname()}")
            continue
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


def _addresses(host: str, port: int) -> list[_Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:  # ValueError: the host is not a valid name
        raise _refusal(host, port, error) from error
    return list(dict.fromkeys((one[0], one[4]) for one in found))


def _bind_hosts(found: dict[str, list[_Address]], port: int) -> list[socket.socket]:
    has_ipv4 = any(family is socket.AF_INET for ones in found.values() for family, _ in ones)
    both = not has_ipv4 and socket.has_dualstack_ipv6()
    with ExitStack() as stack:
        listeners = list[socket.socket]()
        for host, addresses in found.items():
            try:
                port = listeners[0].getsockname()[1] if listeners else port
                bound = _bind_all(addresses, port, both=both)
            except OSError as error:
                raise _refusal(host, port, error) from error
            listeners += [stack.enter_context(one) for one in bound]
        stack.pop_all()
    return listeners


def _refusal(host: str, port: int, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or error
    return UsageError(
        f"The server cannot listen at {host}, port {port} ({reason}).",
        "Choose another address by --host and --port.",
    )


def _bind_all(addresses: Sequence[_Address], port: int, *, both: bool) -> list[socket.socket]:
    """Bind the addresses of one host.

    Args:
        addresses: the addresses.
        port: port of all; 0 for a free one.
        both: whether the address of all of IPv6 stands for all of IPv4 too.
    """
    failure: OSError | None = None
    with ExitStack() as stack:
        listeners = list[socket.socket]()
        for family, address in addresses:
            if listeners:
                port = listeners[0].getsockname()[1]
            place = (address[0], port, *address[2:])
            try:
                bound = _bind_one(family, place, both=both and address[0] == _ANY_IPV6)
                listeners.append(stack.enter_context(bound))
            except OSError as error:
                # A name such as localhost may have an address of a family that is switched off.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                failure = error
        if failure is not None and not listeners:
            raise failure
        stack.pop_all()
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


def _has_listener(path: Path) -> bool:
    """Return whether a process listens at a Unix socket."""
    assert _UNIX is not None
    with socket.socket(_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # its queue is full, or this user may not connect
            return True
    return True
