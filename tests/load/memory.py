"""The growth of a server's memory under load, with an optional leak that must be detected."""

import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from clients import eventually, http, metric
from servers import serving

from load.documents import Document
from load.traffic import make_requests, send

MAX_GROWTH_MIB = 1.0
"""Growth per thousand requests that a warm server may have."""

# A server that returns free memory on SIGUSR1, before each measurement. Otherwise a leak would fill
# the memory that the largest documents have left, and stay invisible for hours.
# One arena (M_ARENA_MAX, -8): glibc keeps up to 64 MiB of free memory in each further arena.
_SERVER = """
import ctypes, gc, signal, sys
ctypes.CDLL(None).mallopt(-8, 1)
from aftserve.cli import main
{changes}
signal.signal(signal.SIGUSR1, lambda *_: (gc.collect(), ctypes.CDLL(None).malloc_trim(0)))
sys.exit(main())
"""
_LEAK = """
from aftserve.serving.service import Service

classify, kept = Service.classify, []

async def keeping(*arguments, **settings):
    kept.append(bytearray(b"x" * {leak}))
    return await classify(*arguments, **settings)

Service.classify = keeping
"""


def trimming_server(changes: str = "") -> tuple[str, str]:
    """Return the program of a server whose memory ``resident_mib`` can measure."""
    # changes: code that runs before the start, such as a fault to be found
    return "-c", _SERVER.format(changes=changes)


def resident_mib(
    address: str, process: "subprocess.Popen[bytes]", read_metric: Callable[[str], float]
) -> float:
    """Return the resident memory of an idle server after it has returned its free memory."""
    eventually(lambda: read_metric("aftserve_idle") == 1, "the server is idle")
    process.send_signal(signal.SIGUSR1)
    eventually(lambda: http.get(f"{address}/healthz").is_success, "memory is trimmed")
    return read_metric("process_resident_memory_bytes") / (1 << 20)


def slope(resident: Sequence[float]) -> float:
    """Return the growth of memory from round to round, from a line through all rounds."""
    return float(np.polyfit(np.arange(len(resident)), resident, 1)[0])


def growth(
    bundle: Path,
    documents: Sequence[Document],
    log: Path,
    *,
    rounds: int,  # measured, after half as many to warm up
    requests: int,  # of each round
    connections: int,
    options: Sequence[str] = (),
    leak: int = 0,  # bytes that the server leaks per request
) -> tuple[float, list[float]]:
    """Return the growth in MiB per 1000 requests of mixed traffic, and the MiB after each round."""
    resident = []
    program = trimming_server(_LEAK.format(leak=leak) if leak else "")
    options = (*options, "--idle-seconds", "0.5")
    with serving(bundle, log, *options, program=program, measured=True) as (address, process):
        for number in range(rounds // 2 + rounds):
            results = send(
                address,
                make_requests(documents, requests, leaving=0.2, hurried=0.1, seed=number),
                connections=connections,
            )
            assert not results.undefined, results.undefined[0]  # failed requests leak nothing
            resident.append(resident_mib(address, process, partial(metric, address)))
    return slope(resident[-rounds:]) * 1000 / requests, resident
