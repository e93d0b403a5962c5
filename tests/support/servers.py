"""Servers on free ports of the loopback interface: real ``aftserve`` processes, and stand-ins."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from commands import environment

COMMAND = ("-m", "aftserve")
Serve = Callable[..., str]
"""The fixture ``serve``, which takes the arguments of ``serving`` without a log."""

# SIGUSR1 ends the engine's thread, as a fault in native code might.
MORTAL = (
    "-c",
    """
import ctypes, signal, sys, threading
from aftserve.cli import main

def kill(*_):
    engine = next(t for t in threading.enumerate() if t.name == "engine")
    fatal = ctypes.py_object(SystemExit)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(engine.ident), fatal)

signal.signal(signal.SIGUSR1, kill)
sys.exit(main())
""",
)


@contextmanager
def serving(
    bundle: Path,
    log: Path,
    *options: str,
    program: Sequence[str] = COMMAND,
    measured: bool = False,
    **variables: str,
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Yields the address and the process once it answers; ends it if the block does not.

    Args:
        bundle: the bundle.
        log: file for the server's output.
        options: options of the command.
        program: arguments of Python.
        measured: whether to wait until the costs are measured, without which nothing is batched.
        variables: changes of the environment.
    """
    words = [sys.executable, *program, str(bundle), "--port", "0", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(
            words,
            env=environment(AFTSERVE_DRAIN_SECONDS="0", **variables),  # nothing balances loads here
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        address = _written(process, log, r"running on (https?://\S+)\s")
        if measured:
            _written(process, log, "(measured the costs)")
        yield address, process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


class Stub(BaseHTTPRequestHandler):
    """Of a server of the tests' own; writes no log."""

    def do_POST(self) -> None:
        self.post(self.rfile.read(int(self.headers["Content-Length"])))

    def post(self, body: bytes) -> None:
        raise NotImplementedError

    def answer(
        self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening(handler: type[Stub]) -> Iterator[str]:
    """Yields the address of a server of the tests' own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _written(process: "subprocess.Popen[bytes]", log: Path, pattern: str) -> str:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(pattern, log.read_text("utf-8")):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text('utf-8')}")
