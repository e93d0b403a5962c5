"""Starting ``aftserve`` over a bundle, and asking it."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from aftexport.errors import AftexportError

HOST = "127.0.0.1"
_START_SECONDS = 60.0
_ANSWER_SECONDS = 120.0
_STOP_SECONDS = 10.0
_LOG_LINES = 20


class ServerError(AftexportError):
    """The server did not start, or did not answer."""


@contextmanager
def serving(bundle: Path, log: Path) -> Iterator[int]:
    """Serves ``bundle`` on a free port of this machine while the block runs.

    Args:
        bundle: the folder to serve.
        log: file that gets everything the server prints.

    Yields:
        The port, once the server is ready.

    Raises:
        ServerError: with the end of the log, where it is not ready within a minute.
    """
    port = _free_port()
    words = [sys.executable, "-m", "aftserve", os.fspath(bundle)]
    words += ["--host", HOST, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _wait_until_ready(process, port, log)
        yield port
    finally:
        _stop(process)


def ask(port: int, text: str) -> dict[str, Any]:
    """Classifies ``text`` by ``POST /infer``; returns the answer's JSON object.

    Raises:
        ServerError: where the answer is anything but 200 and an object.
    """
    body = json.dumps({"text": text}).encode()
    try:
        status, content = _request(port, "POST", "/infer", body, timeout=_ANSWER_SECONDS)
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(
            f"The server did not answer POST /infer: {error}.", "See its log."
        ) from error
    if status != 200:
        raise ServerError(
            f"POST /infer answered {status}: {content.decode(errors='replace')[:500]}.",
            "See the server's log.",
        )
    answer = json.loads(content)
    assert isinstance(answer, dict)
    return answer


def _request(
    port: int, method: str, path: str, body: bytes | None = None, *, timeout: float
) -> tuple[int, bytes]:
    # http.client, not urllib: a proxy set for the network must not come between.
    with closing(http.client.HTTPConnection(HOST, port, timeout=timeout)) as connection:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(
                f"The server ended with status {process.returncode}:\n{_tail(log)}\n",
                f"The whole log is {log}.",
            )
        try:
            if _request(port, "GET", "/readyz", timeout=5)[0] == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet
        time.sleep(0.1)
    raise ServerError(
        f"The server was not ready within {_START_SECONDS:.0f} seconds:\n{_tail(log)}\n",
        f"The whole log is {log}.",
    )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-_LOG_LINES:])
