"""The addresses of the port for gRPC."""

import socket
from collections.abc import Sequence
from urllib.parse import unquote

from aftexport.errors import UsageError
from aftserve.http.listeners import address_text, bind, close_all

_ANY_IPV4, _ANY_IPV6 = "0.0.0.0", "::"


def free_addresses(hosts: Sequence[str], port: int) -> list[str]:
    """Return the addresses with port that gRPC binds for the hosts, each once.

    gRPC takes clients of IPv4 at ``::`` too, so that ``0.0.0.0`` needs no address of its own.

    Args:
        hosts: names or addresses.
        port: port; 0 for one that is free at all addresses.

    Raises:
        UsageError: if an address or the port is not available, or gRPC cannot be limited to the
            addresses.
    """
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


def peer_host(peer: str) -> str:
    """Return the address in gRPC's name of a peer, such as ``ipv6:%5B::1%5D:8081``."""
    scheme, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if scheme in ("ipv4", "ipv6") else ""
