"""``python -m load.health_probe ADDRESS``: the delay of ``/healthz``, and that of the machine.

The process asks a server and a bare responder in turn-free loops until its standard input ends, and
then writes all delays. The responder does nothing else, so that its delays are the machine's.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from commands import environment

from load.client import Connection

_PAUSE_SECONDS = 0.005
_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass(frozen=True)
class Delays:
    """The delays of a run, in ms.

    Attributes:
        health: of ``/healthz``.
        bare: of the bare responder.
    """

    health: list[float]
    bare: list[float]

    @staticmethod
    def quantile(delays: list[float], quantile: float) -> float:
        """Return a quantile."""
        return float(np.quantile(delays, quantile))


@contextmanager
def probing(address: str, folder: Path) -> Iterator[list[Delays]]:
    """Probe a server within the block; the list has the delays after it."""
    found: list[Delays] = []
    with (folder / "probe.log").open("wb") as log:
        words = [sys.executable, "-m", "load.health_probe", address]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, env=environment(), stdin=pipe, stdout=pipe, stderr=log)
        try:
            yield found
        finally:
            content, _ = process.communicate()
    found.append(Delays(**json.loads(content)))


async def _respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(_RESPONSE)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_respond, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _probe(address: str, bare: str) -> Delays:
    delays = Delays([], [])
    loop = asyncio.get_running_loop()

    async def ask(place: str, into: list[float]) -> None:
        connection = Connection(place)
        while True:
            started = time.perf_counter()
            response = await connection.exchange("GET", "/healthz")
            into.append((time.perf_counter() - started) * 1000)
            assert response.status == 200, response
            await asyncio.sleep(_PAUSE_SECONDS)

    asking = asyncio.gather(ask(address, delays.health), ask(bare, delays.bare))
    ending = loop.run_in_executor(None, sys.stdin.buffer.read)
    await asyncio.wait({asking, ending}, return_when=asyncio.FIRST_COMPLETED)
    if asking.done():
        asking.result()
    asking.cancel()
    return delays


def main() -> None:
    """Probe until the end of the standard input, or respond if there is no address."""
    if len(sys.argv) == 1:
        asyncio.run(_serve())
        return
    words = [sys.executable, "-m", "load.health_probe"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as responder:
        try:
            assert responder.stdout is not None
            port = int(responder.stdout.readline())
            delays = asyncio.run(_probe(sys.argv[1], f"http://127.0.0.1:{port}"))
        finally:
            responder.kill()
    print(json.dumps({"health": delays.health, "bare": delays.bare}))


if __name__ == "__main__":
    main()
