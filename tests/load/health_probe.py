"""``python -m load.health_probe ADDRESS PID``: the delay of ``/healthz``, and the machine's part.

The process asks a server and a bare responder, each on a connection of its own, until its standard
input ends, and then writes all delays. The responder does nothing else, so that its delays are
those of the machine. A server that computes waits longer for a core than an idle responder, so
that the time in which its threads wait is measured too.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from commands import environment

from load.client import Connection

_PAUSE_SECONDS = 0.005
_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_COMMAND = (sys.executable, "-m", "load.health_probe")


@dataclass
class Delays:
    """The delays of a run, in ms."""

    health: list[float] = field(default_factory=list)  # of each /healthz
    # Of the server's threads for a core, during each /healthz.
    waits: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)  # of the bare responder

    @property
    def own(self) -> list[float]:
        """The delay of each ``/healthz`` without the waits for a core."""
        pairs = zip(self.health, self.waits, strict=True)
        return [max(0.0, delay - wait) for delay, wait in pairs]


def quantile(delays: Sequence[float], share: float) -> float:
    """Return a quantile of delays."""
    return float(np.quantile(delays, share))


@contextmanager
def probing(address: str, process: "subprocess.Popen[bytes]", log: Path) -> Iterator[Delays]:
    """Probe a server within the block, after which the delays are complete."""
    delays = Delays()
    words = [*_COMMAND, address, str(process.pid)]
    pipe = subprocess.PIPE
    with log.open("wb") as file:
        probe = subprocess.Popen(words, env=environment(), stdin=pipe, stdout=pipe, stderr=file)
        try:
            yield delays
        finally:
            content, _ = probe.communicate()
    for name, values in json.loads(content).items():
        getattr(delays, name).extend(values)


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


def _waits(pid: str) -> Counter[str]:
    """Return the ns that each thread of a process has waited for a core."""
    waits = Counter[str]()
    for file in Path("/proc", pid, "task").glob("*/schedstat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            waits[file.parent.name] = int(file.read_text("ascii").split()[1])
    return waits


async def _probe(address: str, pid: str, bare: str) -> Delays:
    delays = Delays()

    async def ask(connection: Connection) -> float:
        started = time.perf_counter()
        response = await connection.exchange("GET", "/healthz")
        assert response.status == 200, response
        return (time.perf_counter() - started) * 1000

    async def ask_server() -> None:
        connection = Connection(address)
        while True:
            before = _waits(pid)
            delays.health.append(await ask(connection))
            delays.waits.append((_waits(pid) - before).total() / 1e6)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def ask_responder() -> None:
        connection = Connection(bare)
        while True:
            delays.bare.append(await ask(connection))
            await asyncio.sleep(_PAUSE_SECONDS)

    asking = asyncio.gather(ask_server(), ask_responder())
    ending = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
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
    with subprocess.Popen(_COMMAND, stdout=subprocess.PIPE) as responder:
        try:
            assert responder.stdout is not None
            port = int(responder.stdout.readline())
            delays = asyncio.run(_probe(*sys.argv[1:], f"http://127.0.0.1:{port}"))
        finally:
            responder.kill()
    print(json.dumps(asdict(delays)))


if __name__ == "__main__":
    main()
