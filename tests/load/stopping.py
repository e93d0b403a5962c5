"""A server told to stop while many ask: whatever it accepted is answered."""

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from servers import serving

from load.documents import Document
from load.traffic import Request, Results, make_requests, send


@dataclass(frozen=True)
class Stopped:
    """How a server that was told to stop ended.

    Attributes:
        exit_status: of the process.
        results: of its clients.
        lost: requests that it took, by its log, and whose clients got no right answer.
        answered_after: requests answered after the signal.
    """

    exit_status: int
    results: Results
    lost: list[str]
    answered_after: int


def stop_under_load(
    bundle: Path,
    documents: Sequence[Document],
    log: Path,
    *,
    after: int,
    connections: int,
    options: Sequence[str] = (),
) -> Stopped:
    """Sends SIGTERM to a server ``after`` so many requests.

    Nobody leaves and nobody is in a hurry: each of its clients wants its answer.
    """
    words = ("--log-format", "json", "--drain-seconds", "0.2", *options)
    with serving(bundle, log, *words) as (address, process):
        before = 0

        def requests() -> Iterator[Request]:
            nonlocal before
            for number, request in enumerate(make_requests(documents, 1 << 30)):
                if number == after:
                    before = len(_taken(log))
                    process.send_signal(signal.SIGTERM)
                yield request

        results = send(address, requests(), connections=connections)
        exit_status = process.wait(60)
    right = {o.request.name for o in results.outcomes if o.state == "right"}
    taken = _taken(log)
    lost = [name for name in taken if name not in right]
    return Stopped(exit_status, results, lost, len(taken) - before)


def _taken(log: Path) -> list[str]:
    lines = (line for line in log.read_text("utf-8").splitlines() if line.startswith("{"))
    events = [event for event in map(json.loads, lines) if event["logger"] == "aftserve.request"]
    return [event["request_id"] for event in events if "POST /infer" in event["message"]]
