"""A server of a bundle: start ``aftserve`` and send it a document."""

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from aftexport.errors import AftexportError

HOST = "127.0.0.1"
_START_SECONDS = 60.0
_ANSWER_SECONDS = 120.0
_STOP_SECONDS = 10.0
_LOG_LINES = 20
_ADDRESS = re.compile(rb"running on http://[\d.]+:(\d+)\s")
"""The line of the server's log with its port, which the system chooses."""


class ServerError(AftexportError):
    """The server did not start or did not answer."""


@contextmanager
def serving(bundle: Path, log: Path) -> Iterator[int]:
    """Serve ``bundle`` on a free port of this machine while the block runs.

    Raises:
        ServerError: if the server is not ready within a minute; the message has the end of
            the log.
    """
    words = [sys.executable, "-m", "aftserve", os.fspath(bundle)]
    words += ["--host", HOST, "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield _wait_until_ready(process, log)
    finally:
        _stop(process)


def ask(port: int, text: str) -> dict[str, Any]:
    """Send a document to ``POST /infer``; return the answer's JSON object."""
    body = json.dumps({"text": text}).encode()
    try:
        status, content = _request(port, "POST", "/infer", body, timeout=_ANSWER_SECONDS)
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(
            f"The server did not answer POST /infer: {error}.", "See the server's log."
        ) from error
    if status != 200:
        raise ServerError(
            "Expected status 200 from POST /infer, got "
            f"{status}: {content.decode(errors='replace')[:500]}.",
            "See the server's log.",
        )
    answer = json.loads(content)
    assert isinstance(answer, dict)
    return answer


def _request(
    port: int, method: str, path: str, body: bytes | None = None, *, timeout: float
) -> tuple[int, bytes]:
    # Use http.client, because urllib would use a configured network proxy.
    with closing(http.client.HTTPConnection(HOST, port, timeout=timeout)) as connection:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> int:
    """Return the port of the server once it is ready."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(
                f"The server ended with status {process.returncode}:\n{_tail(log)}\n",
                f"Read the whole log in {log}.",
            )
        if found := _ADDRESS.search(log.read_bytes()):
            port = int(found[1])
            with suppress(OSError, http.client.HTTPException):  # it may not listen yet
                if _request(port, "GET", "/readyz", timeout=5)[0] == 200:
                    return port
        time.sleep(0.1)
    raise ServerError(
        f"The server was not ready within {_START_SECONDS:.0f} seconds:\n{_tail(log)}\n",
        f"Read the whole log in {log}.",
    )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-_LOG_LINES:])
