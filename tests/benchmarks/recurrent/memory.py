"""The memory of a call beyond its inputs and its output."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import onnxruntime

from aftexport.bench.timing import peak_mib
from benchmarks.record import Row
from benchmarks.recurrent.contenders import session
from benchmarks.recurrent.workload import Recurrence


def measure_memory(
    names: Sequence[str], workloads: Sequence[Recurrence], threads: int
) -> list[Row]:
    """Measure the workloads with each contender, in processes of their own.

    The processes are forked: call it before this process has run anything in several threads.

    Args:
        names: the contenders; each is a session of ONNX Runtime.
        workloads: the update rules and sizes.
        threads: number of threads.
    """
    rows = []
    for name in names:
        for workload in workloads:
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                found = pool.submit(beyond_mib, name, workload, threads).result()
            rows.append(
                {
                    "contender": name,
                    "rule": workload.rule,
                    "tokens": workload.tokens,
                    "beyond_mib": found,
                }
            )
    return rows


def beyond_mib(name: str, workload: Recurrence, threads: int) -> float | None:
    """Return the maximum increase of resident memory during the first call of a session, in MiB.

    The inputs and the output exist before, and the session keeps no freed memory. So the increase
    is all that a call needs besides them. Return None if the system does not count it.
    """
    feeds = workload.feeds()
    loaded, feeds = session(name, workload, feeds, threads, has_arena=False)
    binding = loaded.io_binding()
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(x) for n, x in feeds.items()}
    for input_name, value in values.items():
        binding.bind_ortvalue_input(input_name, value)
    output = onnxruntime.OrtValue.ortvalue_from_numpy(np.full_like(feeds["value"], np.nan))
    binding.bind_ortvalue_output("output", output)
    found = peak_mib(lambda: loaded.run_with_iobinding(binding))
    if not np.isfinite(output.numpy()).all():
        raise ArithmeticError(f"{workload}: expected numbers in the output of {name}, got NaN")
    return found
