"""A stop under load: the server must answer every request that it accepted."""

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
    """The end of a server after SIGTERM."""

    exit_status: int
    results: Results
    lost: list[str]  # names of logged requests whose clients did not get the right answer
    answered_after: int  # requests answered after the signal


def stop_under_load(
    bundle: Path,
    documents: Sequence[Document],
    log: Path,
    *,
    after: int,
    connections: int,
    options: Sequence[str] = (),
) -> Stopped:
    """Send SIGTERM to a server once its clients have begun ``after`` requests.

    All clients wait for their answers, with a long deadline.
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
