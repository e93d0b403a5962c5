"""Does the server keep memory that it no longer needs? With a leak to prove that one is found."""

import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from clients import eventually, http, metric
from servers import serving

from load.documents import Document
from load.traffic import make_requests, send

MOST_MIB = 1.0
"""For each thousand requests, once the server is warm."""

# A server that gives back what is free before it is looked at, and beside what it gives back by
# itself: a leak would else fill what the largest documents have left, and not be seen for hours.
# With one arena (M_ARENA_MAX): of others glibc keeps what is free at their end, up to 64 MiB.
_SERVER = """
import ctypes, gc, signal, sys
ctypes.CDLL(None).mallopt(-8, 1)
from aftserve.cli import main
from aftserve.service import Service

classify, kept = Service.classify, []

async def keeping(*arguments, **settings):
    kept.append(bytearray(b"x" * {leak}))
    return await classify(*arguments, **settings)

if {leak}:
    Service.classify = keeping
signal.signal(signal.SIGUSR1, lambda *_: (gc.collect(), ctypes.CDLL(None).malloc_trim(0)))
sys.exit(main())
"""


def growth(
    bundle: Path,
    documents: Sequence[Document],
    log: Path,
    *,
    rounds: int,
    requests: int,
    connections: int,
    options: Sequence[str] = (),
    leak: int = 0,
) -> tuple[float, list[float]]:
    """Resident memory of a server from round to round of mixed traffic.

    Args:
        bundle: that it serves.
        documents: that it is asked about; a fifth of the clients leaves.
        log: of the server.
        rounds: that are measured, after half as many for warming up.
        requests: of each round.
        connections: at a time.
        options: of the server.
        leak: bytes of every request that it keeps.

    Returns:
        MiB for each thousand requests, as the line through the rounds has it, and the MiB
        after each round.
    """
    resident = []
    program = "-c", _SERVER.format(leak=leak)
    options = (*options, "--idle-seconds", "0.5")
    with serving(bundle, log, *options, program=program) as (address, process):
        for number in range(rounds // 2 + rounds):
            results = send(
                address,
                make_requests(documents, requests, leaving=0.2, hurried=0.1, seed=number),
                connections=connections,
            )
            assert not results.undefined, results.undefined[0]  # an error keeps nothing
            eventually(lambda: metric(address, "aftserve_idle") == 1, "it is idle")
            process.send_signal(signal.SIGUSR1)
            eventually(lambda: http.get(f"{address}/healthz").is_success, "it has trimmed")
            resident.append(metric(address, "process_resident_memory_bytes") / (1 << 20))
    slope = np.polyfit(np.arange(rounds), resident[-rounds:], 1)[0]
    return float(slope) * 1000 / requests, resident
