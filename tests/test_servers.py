"""Tests that run at the same time get different ports."""

import itertools
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import servers

SUPPORT = Path(__file__).parent / "support"
SAME_START = """
import os, sys

os.getpid = lambda: 7
from servers import free_port

print(*(free_port() for _ in range(5)), flush=True)
sys.stdin.read()
"""


def test_processes_of_equal_start_share_no_port() -> None:
    """The numbers of both processes begin at the same port, and both hold their ports."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAME_START],
            cwd=SUPPORT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    numbers: list[str] = []
    for process in processes:
        assert process.stdout is not None
        numbers += process.stdout.readline().split()
    for process in processes:
        process.communicate("")
    assert len(numbers) == 10
    assert len({*numbers}) == 10


def test_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        taken = next(port for port in range(29_000, 30_000) if is_taken_by(server, port))
        server.listen()
        monkeypatch.setattr(servers, "_numbers", itertools.count(taken - 20_000))
        assert servers.free_port() != taken


def is_taken_by(server: socket.socket, port: int) -> bool:
    try:
        server.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
