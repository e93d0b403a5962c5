"""The speed of the server against its bare engine, and against other servers."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import numpy as np
from clients import eventually, http
from commands import environment
from servers import free_port

from aftserve.model.classifier import Classifier
from load.client import Connection
from load.documents import Document
from load.traffic import Request, send

CONTENDERS = {
    "LitServe, one by one": ("litserve_server",),
    "LitServe, batches of 8": ("litserve_server", "--batch", "8"),
    "FastAPI": ("fastapi_server",),
}
"""The programs in ``load.contenders`` and their options."""
PACKAGES = Path("build/contenders")
"""Packages that ``make load`` installs for the contenders, apart from those of the server."""
_DEADLINE_SECONDS = 300.0


@dataclass
class Speed:
    """The speed of one way to answer documents."""

    rounds: list[float] = field(default_factory=list)  # documents per second of each
    seconds: list[float] = field(default_factory=list)  # of each answer
    wrong: int = 0  # also missing ones

    @property
    def documents_per_second(self) -> float:
        """Throughput of the median round."""
        return median(self.rounds)

    def over(self, other: "Speed") -> float:
        """Return the median ratio of its throughput to the other's in the same round."""
        return median(a / b for a, b in zip(self.rounds, other.rounds, strict=True))

    @property
    def p99_seconds(self) -> float:
        """The 99th percentile of the latency."""
        return float(np.quantile(self.seconds, 0.99))


Way = Callable[[Sequence[Document]], Speed]
"""A function that answers all documents once."""


def over_http(address: str, connections: int) -> Way:
    """Answer documents by a server with ``connections`` clients, all of which stay."""

    def answer(documents: Sequence[Document]) -> Speed:
        requests = [
            Request(str(number), document, document.as_text, _DEADLINE_SECONDS, None)
            for number, document in enumerate(documents)
        ]
        results = send(address, requests, connections=connections)
        wrong = len(results.outcomes) - results.states["right"]
        rate = len(documents) / results.wall_seconds
        return Speed([rate], [outcome.seconds for outcome in results.outcomes], wrong)

    return answer


def by_engine(engine: Classifier) -> Way:
    """Answer documents by the bare engine, one after the other, without tokenization."""

    def answer(documents: Sequence[Document]) -> Speed:
        seconds = []
        for document in documents:
            started = time.perf_counter()
            engine.classify([document.ids])
            seconds.append(time.perf_counter() - started)
        return Speed([len(documents) / sum(seconds)], seconds)

    return answer


def compare(
    ways: Mapping[str, Way], documents: Sequence[Document], rounds: int
) -> dict[str, Speed]:
    """Run the ways in turn, A B C A B C, so that a slow moment of the machine affects all of them.

    A first round, which is not measured, warms them up.
    """
    speeds = {name: Speed() for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            speed = way(documents)
            speeds[name].wrong += speed.wrong
            if number:
                speeds[name].rounds += speed.rounds
                speeds[name].seconds += speed.seconds
    return speeds


def overhead_seconds(
    address: str, engine: Classifier, document: Document, *, blocks: int, repeats: int = 20
) -> tuple[float, float]:
    """Measure a client's requests about one document, alternating with runs of the bare engine."""

    async def run() -> tuple[float, float]:
        connection, body = Connection(address), document.as_text
        served, bare = [], []
        for _ in range(blocks):
            for _ in range(repeats):
                started = time.perf_counter()
                await connection.post("/infer", body)
                served.append(time.perf_counter() - started)
            for _ in range(repeats):
                started = time.perf_counter()
                engine.classify([document.ids])
                bare.append(time.perf_counter() - started)
        connection.close()
        return median(served), median(bare)

    return asyncio.run(run())


@contextmanager
def contender(program: Sequence[str], checkpoint: Path, threads: int, log: Path) -> Iterator[str]:
    """Run another server with the same model, and yield its address once it answers."""
    port = free_port()
    name, *options = program
    words = [sys.executable, "-m", f"load.contenders.{name}", str(checkpoint), *options]
    words += ["--port", str(port), "--threads", str(threads)]
    paths = [str(PACKAGES.absolute()), str(Path(__file__).parents[1])]
    with log.open("wb") as file:
        # LitServe runs several processes: a session of its own lets killpg end all of them.
        process = subprocess.Popen(
            words, env=environment(PYTHONPATH=os.pathsep.join(paths)), stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: process.poll() is not None or _answers(address), f"{name} answers")
        if process.poll() is not None:
            raise RuntimeError(f"{name} did not start: {log.read_text('utf-8')}")
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _answers(address: str) -> bool:
    try:
        return http.post(f"{address}/infer", json={"text": "a"}, timeout=10).status_code == 200
    except httpx.TransportError:
        return False
