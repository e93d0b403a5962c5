"""Ports for programs that cannot choose a free one themselves."""

import itertools
import os
import socket

_FIRST, _COUNT = 20_000, 10_000
"""Ports below those that systems give to sockets without a port: no other test gets them so."""
_PER_PROCESS = 100

_numbers = itertools.count(os.getpid() * _PER_PROCESS)


def free_port() -> int:
    """Return a port of the loopback interface that is free, and that this process never returned.

    Processes begin at different ports, so that two workers of xdist do not choose the same one.
    """
    for number in itertools.islice(_numbers, _COUNT):
        port = _FIRST + number % _COUNT
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("every port is taken")
