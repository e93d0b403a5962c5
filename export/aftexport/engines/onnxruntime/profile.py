"""The time of each operator type, measured by ONNX Runtime's profiler."""

import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aftexport.engines import Tensors
from aftexport.engines.onnxruntime.sessions import session, session_options

_RUNS = 3


def operator_shares(
    model: Path | bytes, inputs: Tensors, *, threads: int = 0, fused: bool = True
) -> dict[str, float]:
    """Return the share of each operator type in the time of the fastest run, the largest first.

    Args:
        model: path of ``model.onnx``, or the serialized model.
        inputs: the inputs of all runs; the first run is not counted.
        threads: number of threads per operator; 0 for ``usable_cores``.
        fused: whether the kernel library is registered, if it is built.

    Raises:
        EngineError: if the runtime refuses the model or the kernel library.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = session_options(threads)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        profiled = session(model, options, fused=fused)
        for _ in range(_RUNS + 1):
            profiled.run(None, dict(inputs))
        events = json.loads(Path(profiled.end_profiling()).read_text("utf-8"))
    return shares(events)


def shares(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the shares from the profiler's events of several runs; see ``operator_shares``."""
    ends = sorted(e["ts"] + e["dur"] for e in events if e["name"] == "model_run")
    runs: list[Counter[str]] = [Counter() for _ in ends]
    for event in events:
        if event["name"].endswith("_kernel_time"):
            runs[bisect_right(ends, event["ts"])][event["args"]["op_name"]] += event["dur"]
    # In slower runs, operators waited for other work of the machine.
    fastest = min(runs[1:], key=Counter.total)
    # The profiler counts whole microseconds, so the total of a small model may be 0.
    total = max(fastest.total(), 1)
    return {op_type: spent / total for op_type, spent in fastest.most_common()}
