"""The part of the engines that needs a GPU and no TensorRT: memory, copies and graphs."""

import traceback

from benchmarks.gpu.outcome import Outcome

WHAT = "memory, copies and graphs by the CUDA bindings"


def check() -> Outcome:
    """What ``aftexport.engines.cuda`` does, there and back."""
    try:
        import numpy as np

        from aftexport.engines import cuda

        cuda.runtime()
    except Exception as error:
        return Outcome.skip(WHAT, str(error), "--no-bindings")
    try:
        stream, size = cuda.Stream(), 1 << 20
        source, target, memory = cuda.Pinned(size), cuda.Pinned(size), cuda.Memory(size)
        sent = source.array((size // 8,), np.dtype(np.int64))
        received = target.array((size // 8,), np.dtype(np.int64))
        graph = stream.capture(lambda: stream.to_host(target, memory, size))
        for first in (1, 2):
            sent[:] = np.arange(first, first + len(sent))
            stream.to_device(memory, source, size)
            graph.launch(stream)
            stream.wait()
            if not np.array_equal(sent, received):
                return Outcome(WHAT, "other numbers come back", passed=False)
        return Outcome(WHAT, f"{cuda.device()}")
    except Exception as error:
        return Outcome(WHAT, str(error), passed=False, printed=traceback.format_exc())
