"""Concurrent clients: their requests, disconnections and outcomes."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from load.client import Connection, ConnectionEndedError
from load.documents import Document

CONTRACT = {413, 429, 504}
"""Status codes of valid refusals: deadline too short, queue too long, deadline passed."""
GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class Request:
    """A request of one client."""

    name: str  # request ID in the server's log
    document: Document
    body: bytes  # text or token IDs, in JSON
    deadline_seconds: float
    patience_seconds: float | None  # until the client disconnects


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request."""

    request: Request
    # Right, wrong, left (client disconnected), ended (connection), refused (no listener), or a
    # status.
    state: str
    seconds: float
    predicted: float | None = None  # seconds, at acceptance


@dataclass
class Results:
    """The outcomes of all requests."""

    outcomes: list[Outcome] = field(default_factory=list)
    # From the first request, with all clients connected, to the last outcome.
    wall_seconds: float = 0.0

    @property
    def states(self) -> Counter[str]:
        """Number of requests by state."""
        return Counter(outcome.state for outcome in self.outcomes)

    @property
    def undefined(self) -> list[Outcome]:
        """Outcomes that the contract does not allow."""
        defined = {"right", "left", *map(str, CONTRACT)}
        return [outcome for outcome in self.outcomes if outcome.state not in defined]

    @property
    def late(self) -> list[Outcome]:
        """Outcomes later than a second after their deadline."""
        return [o for o in self.outcomes if o.seconds > o.request.deadline_seconds + GRACE_SECONDS]

    def seconds(self, quantile: float) -> float:
        """Return a quantile of the latency of right answers."""
        return float(np.quantile([o.seconds for o in self._answers], quantile))

    def ratio(self, quantile: float) -> float:
        """Return a quantile of actual over predicted time."""
        ratios = [o.seconds / o.predicted for o in self._answers if o.predicted is not None]
        return float(np.quantile(ratios, quantile))

    @property
    def _answers(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.state == "right"]


def make_requests(
    documents: Sequence[Document],
    count: int,
    *,
    leaving: float = 0.0,  # share of the clients that disconnect within a fifth of a second
    hurried: float = 0.0,  # share of the clients with a deadline between 20 ms and a second
    seed: int = 0,
) -> Iterator[Request]:
    """Draw requests about random documents, as text and as token IDs."""
    generator = np.random.default_rng(seed)
    bodies = [(document, document.as_text, document.as_ids) for document in documents]
    for number in range(count):
        document, *forms = bodies[generator.integers(len(bodies))]
        yield Request(
            name=f"{seed}-{number}",
            document=document,
            body=forms[generator.integers(2)],
            deadline_seconds=generator.uniform(0.02, 1) if generator.random() < hurried else 60.0,
            patience_seconds=generator.uniform(0, 0.2) if generator.random() < leaving else None,
        )


def send(address: str, requests: Iterable[Request], *, connections: int) -> Results:
    """Send requests from concurrent clients, each its next after the end of its last.

    A client stops once the server refuses connections.
    """
    return asyncio.run(_send(address, iter(requests), connections))


async def _send(address: str, requests: Iterator[Request], connections: int) -> Results:
    results = Results()

    async def client(connection: Connection) -> None:
        for request in requests:
            outcome = await _ask(connection, request)
            results.outcomes.append(outcome)
            if outcome.state == "refused":
                break
        connection.close()

    clients = [Connection(address) for _ in range(connections)]
    await asyncio.gather(*(connection.open() for connection in clients))
    started = time.perf_counter()
    await asyncio.gather(*map(client, clients))
    results.wall_seconds = time.perf_counter() - started
    return results


async def _ask(connection: Connection, request: Request) -> Outcome:
    started = time.perf_counter()

    def ended(state: str, predicted: float | None = None) -> Outcome:
        return Outcome(request, state, time.perf_counter() - started, predicted)

    try:
        async with asyncio.timeout(request.patience_seconds):
            response = await connection.post(
                "/infer",
                request.body,
                X_Request_ID=request.name,
                Deadline_Seconds=f"{request.deadline_seconds:.3f}",
            )
    except TimeoutError:
        return ended("left")
    except ConnectionRefusedError:
        return ended("refused")
    except ConnectionEndedError:
        return ended("ended")
    if response.status != 200:
        return ended(str(response.status))
    answer = json.loads(response.body)
    answer = answer["results"][0] if "results" in answer else answer
    right = request.document.is_answered_by(answer["scores"])
    predicted = answer.get("timings", {}).get("predicted_seconds")
    return ended("right" if right else "wrong", predicted)
