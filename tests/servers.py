"""Servers on free ports of the loopback interface: real ``aftserve`` processes, and stand-ins."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from commands import environment

COMMAND = ("-m", "aftserve")

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
    bundle: Path, log: Path, *options: str, program: Sequence[str] = COMMAND
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Yields the address and the process once it answers; ends it if the block does not."""
    words = [sys.executable, *program, str(bundle), "--port", "0", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, env=environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        yield _address(process, log), process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yields the address of a server of the tests' own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"running on (http://\S+)", log.read_text("utf-8")):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text('utf-8')}")
