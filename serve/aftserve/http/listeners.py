"""The sockets that the server listens on."""

import errno
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from aftexport.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows, where Python lacks Unix sockets too
    fcntl = None  # type: ignore[assignment]

_MAX_ATTEMPTS = 16
_ANY_IPV6 = "::"
_ANY = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: _ANY_IPV6}
"""The address that covers all others of its family."""
_Address = tuple[socket.AddressFamily, Any]
_MODE = 0o666
"""Permissions of a socket, as in uvicorn: those of its folder decide who may connect."""
_FAMILY: int | None = getattr(socket, "AF_UNIX", None)
_LOCK_SECONDS = 5.0
"""Maximum wait for the lock of a folder, which a server holds for a moment."""
_POLL_SECONDS = 0.01


def bind(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Bind a socket for each address of the hosts, all to one port; they do not listen yet."""
    # ``::`` takes clients of IPv4 too, if the system can do so and no host is of IPv4. Hosts that
    # have an address in common share a socket: a second one could be bound, but could not listen.
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


def listen(listeners: Sequence[socket.socket], backlog: int) -> None:
    """Listen on bound sockets; UsageError if another process has taken an address since."""
    for listener in listeners:
        try:
            listener.listen(backlog)
        except OSError as error:
            host, port, *_ = listener.getsockname()
            raise _refusal(host, port, error) from error


def is_unix(listener: socket.socket) -> bool:
    """Return whether a socket is a Unix socket."""
    return isinstance(listener, UnixListener)


def close_all(listeners: Sequence[socket.socket]) -> None:
    """Close sockets, and remove the paths of Unix sockets."""
    remove_paths(listeners)
    for listener in listeners:
        listener.close()


def remove_paths(listeners: Sequence[socket.socket]) -> None:
    """Remove the paths of Unix sockets, which stay open."""
    # After a socket is closed, another server may bind its path, and would lose it.
    for listener in listeners:
        if isinstance(listener, UnixListener):
            with suppress(OSError):  # the server may no longer write the folder
                listener.remove_path()


def urls(listeners: Sequence[socket.socket], scheme: str = "http") -> list[str]:
    """Return the URL of each socket; a socket of IPv6 and IPv4 has two."""
    found = list[str]()
    for listener in listeners:
        if is_unix(listener):
            found.append(f"unix:{listener.getsockname()}")
            continue
        host, port, *_ = listener.getsockname()
        found.append(f"{scheme}://{address_text(host, port)}")
        is_ipv6 = listener.family is socket.AF_INET6
        if is_ipv6 and not listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
            found.append(f"{scheme}://{address_text(_ANY[socket.AF_INET], port)}")
    return found


def address_text(host: str, port: int) -> str:
    """Return an address with its port, as URLs and gRPC write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def accept_waiting(listener: socket.socket, max_connections: int) -> list[socket.socket]:
    """Accept the connections that the system holds for a non-blocking socket."""
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
    every = {one for ones in found.values() for one in ones}
    any_address = {one[0]: one for one in every if one[1][0] == _ANY.get(one[0])}
    has_ipv4 = any(family is socket.AF_INET for family, _ in every)
    both = not has_ipv4 and socket.has_dualstack_ipv6()
    bound = dict[_Address, socket.socket]()
    with ExitStack() as stack:
        stack.callback(lambda: close_all([*bound.values()]))
        for host, addresses in found.items():
            own = [any_address.get(one[0], one) for one in addresses]
            try:
                port = next(iter(bound.values())).getsockname()[1] if bound else port
                _bind_all(own, port, bound, both=both)
            except OSError as error:
                raise _refusal(host, port, error) from error
        stack.pop_all()
    return [*bound.values()]


def _refusal(host: str, port: int, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or error
    return UsageError(
        f"The server cannot listen at {host}, port {port} ({reason}).",
        "Choose another address by --host and --port.",
    )


def _bind_all(
    addresses: Sequence[_Address],
    port: int,
    bound: dict[_Address, socket.socket],
    *,
    both: bool,
) -> None:
    """Bind the addresses of a host, and add the sockets to ``bound``.

    With ``both``, the address of all of IPv6 stands for all of IPv4 too.
    """
    failure: OSError | None = None
    for one in addresses:
        if one in bound:
            continue
        family, address = one
        if bound:
            port = next(iter(bound.values())).getsockname()[1]
        place = (address[0], port, *address[2:])
        try:
            bound[one] = _bind_one(family, place, both=both and address[0] == _ANY_IPV6)
        except OSError as error:
            # A name such as localhost may have an address of a family that is switched off.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            failure = error
    if failure is not None and bound.keys().isdisjoint(addresses):
        raise failure


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


class UnixListener(socket.socket):
    """A Unix socket that knows the device and number of its path's file."""

    file: tuple[int, int] | None = None

    def bind_path(self, path: Path) -> None:
        """Bind the socket to a path, for every user who may enter the folder."""
        self.bind(str(path))
        self.file = _file_of(path)
        path.chmod(_MODE)

    def remove_path(self) -> None:
        """Remove the path, unless another process has removed or replaced it."""
        path = Path(self.getsockname())
        with suppress(FileNotFoundError):
            if self.file is not None and _file_of(path) == self.file:
                path.unlink()


def bind_unix(path: Path, backlog: int) -> UnixListener:
    """Listen at a path. A socket that a dead process left is replaced."""
    with _bound(path) as listener:
        # Within the lock: another server takes a socket that does not listen for a dead one.
        listener.listen(backlog)
        return listener


def check_unix(path: Path) -> None:
    """Check that a server can listen at a path, and leave no socket there."""
    with _bound(path) as listener, listener:
        listener.remove_path()


@contextmanager
def _bound(path: Path) -> Iterator[UnixListener]:
    """Yield a bound socket while no other server binds a path in the folder."""
    if _FAMILY is None:
        raise UsageError(
            f"--uds {path}: this system has no Unix sockets.", "Use --host and --port."
        )
    listener = UnixListener(_FAMILY, socket.SOCK_STREAM)
    try:
        with _locked(path.parent):
            if path.is_socket() and not _has_listener(path):
                path.unlink()
            listener.bind_path(path)
            yield listener
    except OSError as error:
        listener.close()
        raise UsageError(
            f"--uds {path}: the server cannot listen there ({error.strerror or error}).",
            "Name a path without a file, in a folder that the server's user may read and write.",
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which the system releases however the process ends."""
    end = time.monotonic() + _LOCK_SECONDS
    opened = os.open(folder, os.O_RDONLY)
    try:
        while not _is_locked(opened):
            if time.monotonic() > end:
                raise OSError(errno.EWOULDBLOCK, "another process keeps the folder locked")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(opened)


def _is_locked(opened: int) -> bool:
    """Try to lock an open folder, and return whether it is locked."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _file_of(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _has_listener(path: Path) -> bool:
    """Return whether a process listens at a Unix socket."""
    assert _FAMILY is not None
    with socket.socket(_FAMILY, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # its queue is full, or this user may not connect
            return True
    return True
