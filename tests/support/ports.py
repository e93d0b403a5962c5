"""Ports for programs that cannot choose a free one themselves."""

import atexit
import itertools
import os
import socket
from contextlib import ExitStack

_FIRST, _COUNT = 20_000, 10_000
"""Ports below those that systems give to sockets without a port: no other test gets them so."""
_PER_PROCESS = 100

_numbers = itertools.count(os.getpid() * _PER_PROCESS)
_claims = ExitStack()
"""The sockets by which this process claims ports."""
atexit.register(_claims.close)


def free_port() -> int:
    """Return a port of the loopback interface that is free, for this process only.

    A socket in the abstract namespace of Linux claims the port until the process ends. No other
    process of the same network can have a socket of that name.
    """
    for number in itertools.islice(_numbers, _COUNT):
        port = _FIRST + number % _COUNT
        claim = socket.socket(socket.AF_UNIX)
        if _is_bound(claim, f"\0aftexport-test-port-{port}") and _is_free(port):
            _claims.enter_context(claim)
            return port
        claim.close()
    raise AssertionError("every port is taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _is_bound(probe, ("127.0.0.1", port))


def _is_bound(one: socket.socket, address: str | tuple[str, int]) -> bool:
    """Bind a socket; return whether the address was free."""
    try:
        one.bind(address)
    except OSError:
        return False
    return True
