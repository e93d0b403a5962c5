"""Does the server keep memory that it no longer needs? With a leak to prove that one is found."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from clients import eventually, metric
from servers import COMMAND, serving

from load.documents import Document
from load.traffic import make_requests, send

MOST_MIB = 1.0
"""For each thousand requests, once the server is warm."""

_LEAKING = """
import sys
from aftserve.cli import main
from aftserve.service import Service

classify, kept = Service.classify, []

async def leaking(self, request, deadline):
    kept.append(bytes({size}))
    return await classify(self, request, deadline)

Service.classify = leaking
sys.exit(main())
"""


def leaking(size: int) -> tuple[str, ...]:
    """A server that keeps so many bytes of every request."""
    return "-c", _LEAKING.format(size=size)


def growth(
    bundle: Path,
    documents: Sequence[Document],
    log: Path,
    *,
    rounds: int,
    requests: int,
    connections: int,
    options: Sequence[str] = (),
    program: Sequence[str] = COMMAND,
) -> tuple[float, list[float]]:
    """Resident memory of a server from round to round of mixed traffic.

    Args:
        bundle: that it serves.
        documents: that it is asked about; a fifth of the clients leaves.
        log: of the server.
        rounds: that are measured, after as many for warming up.
        requests: of each round.
        connections: at a time.
        options: of the server.
        program: the server.

    Returns:
        MiB for each thousand requests, as the line through the rounds has it, and the MiB
        after each round.
    """
    resident = []
    with serving(bundle, log, *options, program=program) as (address, _):
        for number in range(2 * rounds):
            send(
                address,
                make_requests(documents, requests, leaving=0.2, hurried=0.1, seed=number),
                connections=connections,
            )
            eventually(lambda: _idle(address), "the queue is empty")
            resident.append(metric(address, "process_resident_memory_bytes") / (1 << 20))
    slope = np.polyfit(np.arange(rounds), resident[rounds:], 1)[0]
    return float(slope) * 1000 / requests, resident


def _idle(address: str) -> bool:
    time.sleep(0.05)
    busy = ("aftserve_waiting_documents", "aftserve_running_documents")
    return all(metric(address, name) == 0 for name in busy)
