"""The addresses of the port for gRPC, and of the clients that are connected to it."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote

from aftexport.errors import UsageError
from aftserve.http.listeners import address_text, bind, close_all

_ANY_IPV4, _ANY_IPV6 = "0.0.0.0", "::"


def free_addresses(hosts: Sequence[str], port: int) -> list[str]:
    """Return the addresses with port that gRPC binds for the hosts, each once.

    gRPC takes clients of IPv4 at ``::`` too, so that ``0.0.0.0`` needs no address of its own.

    Raises:
        UsageError: if an address or the port is not available, or gRPC cannot be limited to the
            addresses.
    """
    # port: 0 for one that is free at all addresses
    try:
        listeners = bind(hosts, port)
    except UsageError as error:
        raise UsageError(
            f"gRPC: {error.problem}", "Choose another address by --host and --grpc-port."
        ) from error
    try:
        names = [one.getsockname() for one in listeners]
    finally:
        close_all(listeners)
    found = [name[0] for name in names]
    if _ANY_IPV6 in found and socket.has_dualstack_ipv6():
        rest = [one for one in found if one not in (_ANY_IPV4, _ANY_IPV6)]
        if rest:
            raise UsageError(
                f"gRPC at {_ANY_IPV6} takes clients at every address of IPv4 too, got a --host for "
                f"{', '.join(rest)} beside it.",
                f"Choose --host {_ANY_IPV6}, or only addresses of this machine.",
            )
        found = [_ANY_IPV6]
    return [address_text(host, names[0][1]) for host in found]


def close_connection(peer: str, port: int) -> None:
    """Close the connection of a client, which ends its calls.

    gRPC has no function for it, so the socket is looked for among the open files of the process.
    Windows does not list them: there the connection stays until its client has gone.
    """
    wanted = _peer_address(peer)
    files = Path("/dev/fd")
    for file in files.iterdir() if files.is_dir() else ():
        with suppress(OSError), _second_socket(int(file.name)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            host, remote_port = one.getpeername()[:2]
            if (_address(host), remote_port) == wanted and one.getsockname()[1] == port:
                one.shutdown(socket.SHUT_RDWR)


def _second_socket(number: int) -> socket.socket:
    """Return the socket of a file descriptor, by one of its own that gRPC cannot close meanwhile.

    Raises:
        OSError: if it is not a socket, or not open.
    """
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _peer_address(peer: str) -> tuple[str, int]:
    return _address(peer_host(peer)), int(unquote(peer).rpartition(":")[2])


def _address(host: str) -> str:
    """Return an address in one form; a client of IPv4 has two at a socket of IPv6."""
    address = ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def peer_host(peer: str) -> str:
    """Return the address in gRPC's name of a peer, such as ``ipv6:%5B::1%5D:8081``."""
    scheme, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if scheme in ("ipv4", "ipv6") else ""
