"""Run as a script: peak memory of a body over what the process held before, in KiB.

    python peak_memory.py MODEL INPUTS OUTPUT TOKENS...

Prints one number for each length, in rising order; writes the last length's output.
Imports neither torch nor the package, whose own peaks would hide the body's.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def peak_kib() -> int:
    # Not getrusage: a child's maximum starts at what its parent held.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def main(model: str, inputs: str, output: str, *lengths: str) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = dict(np.load(inputs))

    def run(tokens: int) -> np.ndarray:
        # The last tokens: a late large key has every length compute the same form.
        cut = {n: x[:, -tokens:] if x.ndim == 3 else x for n, x in feeds.items()}
        return session.run(None, cut | {"lengths": np.array([tokens])})[0]

    run(64)
    # Else memory that loading took for a moment hides a part of the first run's peak.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_kib()
    for tokens in map(int, lengths):
        result = run(tokens)
        print(peak_kib() - before)
    np.save(output, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
