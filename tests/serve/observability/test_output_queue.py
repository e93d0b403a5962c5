"""Standard output and error that are not read, of a server and of small programs."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from clients import eventually, http, metric
from commands import environment
from servers import free_port

UNBLOCKED = "from aftserve.observability.logging import *\nunblock_output()\n"
_STALLING = """
import signal, sys, time
from aftserve.cli import main

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000))
sys.exit(main())
"""


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """Yield the writing end of a pipe that stays full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"a" * 4096)
    os.set_blocking(writing, True)
    yield writing
    os.close(writing)
    os.close(reading)


@pytest.fixture
def left_pipe() -> Iterator[int]:
    """Yield the writing end of a pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def answers(address: str, path: str = "/healthz") -> bool:
    try:
        return http.get(address + path).status_code in (200, 404)
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 1)])
def test_full_output_does_not_stop_server(
    number: signal.Signals, code: int, full_pipe: int, bundle_folder: Path
) -> None:
    """The server starts, answers and ends, also if its event loop is blocked."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", _STALLING, bundle_folder, "--port", str(port),
         "--stall-seconds", "2"],
        env=environment(AFTSERVE_DRAIN_SECONDS="0"),
        stdin=subprocess.DEVNULL, stdout=full_pipe, stderr=full_pipe,
    )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        eventually(lambda: process.poll() is not None or answers(address), "the server starts")
        for _ in range(30):
            assert answers(address, "/" + "a" * 10_000)
        assert metric(address, "aftserve_log_lines_dropped_total") > 0
        assert http.post(f"{address}/infer", json={"text": "abc"}).status_code == 200
        process.send_signal(number)
        assert process.wait(30) == code
    finally:
        process.kill()
        process.wait()


def run(
    program: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE
) -> tuple[int, str]:
    """Run a program with these streams; return its exit status and the output that is piped."""
    done = subprocess.run(
        [sys.executable, "-c", UNBLOCKED + program],
        env=environment(), stdin=subprocess.DEVNULL, timeout=60, text=True,
        stdout=stdout, stderr=stderr,
    )  # fmt: skip
    return done.returncode, f"{done.stdout or ''}{done.stderr or ''}"


_WRITES = {
    "print": "import sys; print('a\\n' * 100_000, file=sys.stderr); print('a')",
    "logging": "import logging; [logging.error('a' * 10_000) for _ in range(100)]",
    "warnings": "import warnings; [warnings.warn('a' * 10_000 + str(n)) for n in range(100)]",
    "native": "import os\ntry: os.write(2, b'a')\nexcept BlockingIOError: pass",
    "faulthandler": "import faulthandler; [faulthandler.dump_traceback() for _ in range(100)]",
    "exception": "import sys; raise SystemExit('a' * 200_000)",
    "rich": "from rich.console import Console; Console(stderr=True).print('a\\n' * 2_000)",
}


@pytest.mark.parametrize("write", _WRITES.values(), ids=_WRITES)
def test_full_output_does_not_block(write: str, full_pipe: int) -> None:
    code, other = run(write, stderr=full_pipe)
    assert code == ("SystemExit" in write)
    assert "Traceback" not in other
    assert os.get_blocking(full_pipe)  # other processes share the pipe


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_departed_reader_does_not_end_program(stream: str, left_pipe: int) -> None:
    program = (
        "import sys; print('a', file=sys.stdout); print('b', file=sys.stderr); flush_output();"
        "sys.exit(40 + dropped_lines())"
    )
    code, other = run(program, **{stream: left_pipe})
    assert code > 40
    if stream == "stdout":
        assert "standard output cannot be written (Broken pipe)" in other


def test_lines_stay_whole_and_ordered() -> None:
    program = "import os\nfor n in range(1000): print(n, '-' * 50)\nos.write(2, b'native')"
    code, output = run(program)
    assert code == 0
    assert re.findall(r"(\d+) -{50}\n", output) == [str(n) for n in range(1000)]
    assert output.endswith("native")


def test_dropped_lines_are_reported_later() -> None:
    reading, writing = os.pipe()
    program = (
        "import sys; [print('a' * 999) for _ in range(1000)];"
        "print(dropped_lines(), file=sys.stderr)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", UNBLOCKED + program],
        env=environment(), stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    os.close(writing)
    assert process.stderr is not None
    with process, os.fdopen(reading) as output:
        dropped = int(process.stderr.readline())
        lines = output.read().splitlines()
        assert f"{dropped} lines of standard output were dropped" in process.stderr.read()
    assert len(lines) == 1000 - dropped
    assert dropped > 500


def test_closed_streams_are_not_reused() -> None:
    program = "import os, socket; os._exit(40 + socket.socket().fileno())"
    closed = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable]
    done = subprocess.run(
        [*closed, UNBLOCKED + program],
        env=environment(), timeout=60,
    )  # fmt: skip
    assert done.returncode > 42
