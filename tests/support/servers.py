"""Servers on free ports of the loopback interface: ``aftserve``, applications and stand-ins."""

import atexit
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from clients import eventually
from commands import environment
from prometheus_client import Counter

from aftserve.http.connection import Connection
from aftserve.observability.health import Health

COMMAND = ("-m", "aftserve")
Serve = Callable[..., str]
"""The fixture ``serve``, which takes the arguments of ``serving`` without a log."""

_FIRST, _COUNT = 20_000, 10_000
"""Ports below those that systems give to sockets without a port: no other test gets them so."""
_PER_PROCESS = 100

_numbers = itertools.count(os.getpid() * _PER_PROCESS)
_claims = ExitStack()
"""The sockets by which this process claims ports."""
atexit.register(_claims.close)

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

    A ``measured`` server has measured its costs, without which nothing is batched. ``variables``
    change the environment.
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


async def no_content(scope: Any, receive: Any, send: Any) -> None:
    """Answer with status 204."""
    await send({"type": "http.response.start", "status": 204})
    await send({"type": "http.response.body"})


@contextmanager
def running(app: Any, seconds: float = 60, **options: Any) -> Iterator[uvicorn.Server]:
    """Serve an application in this process, behind the connections under test."""
    responses = Counter("responses", "", ["path", "status", "model"], registry=None)
    http = Connection.within(seconds, responses, Health())
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
            **options,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started, "the server starts")
        yield server
    finally:
        server.should_exit = True
        thread.join()


def address_of(server: uvicorn.Server) -> str:
    host, port = server.servers[0].sockets[0].getsockname()
    return f"http://{host}:{port}"


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the files of a self-signed certificate for loopback, and of its private key.

    ``name`` is that of the organization in the certificate, and of the files.
    """
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/O={name}/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


def encrypt_key(key: Path) -> Path:
    """Return the file of the same private key under a password."""
    encrypted = key.with_suffix(".encrypted")
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", encrypted],
        check=True,
        capture_output=True,
    )
    return encrypted


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
