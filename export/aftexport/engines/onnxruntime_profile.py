"""Where a model's time goes in ONNX Runtime, by its own profiler."""

import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aftexport.engines import Tensors
from aftexport.engines.onnxruntime import session, session_options

_RUNS = 3


def operator_shares(
    model: Path | bytes, inputs: Tensors, *, threads: int = 0, fused: bool = True
) -> dict[str, float]:
    """The share of each operator type in the time of the quickest run, the largest first.

    Args:
        model: path of ``model.onnx``, or the serialized model.
        inputs: of the runs, the first of which is not counted.
        threads: of one operator; 0 for ``usable_cores``.
        fused: register the kernel library where it is built.

    Raises:
        EngineError: where the runtime refuses the model or the kernel library.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = session_options(threads=threads, fused=fused)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        profiled = session(model, options)
        for _ in range(_RUNS + 1):
            profiled.run(None, dict(inputs))
        events = json.loads(Path(profiled.end_profiling()).read_text("utf-8"))
    return shares(events)


def shares(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the profiler's events of several runs; see ``operator_shares``."""
    ends = sorted(e["ts"] + e["dur"] for e in events if e["name"] == "model_run")
    runs: list[Counter[str]] = [Counter() for _ in ends]
    for event in events:
        if event["name"].endswith("_kernel_time"):
            runs[bisect_right(ends, event["ts"])][event["args"]["op_name"]] += event["dur"]
    # In the others an operator, whichever it is, waited for what else the machine does.
    quickest = min(runs[1:], key=Counter.total)
    # The profiler counts whole microseconds; a model may take none.
    total = max(quickest.total(), 1)
    return {op_type: spent / total for op_type, spent in quickest.most_common()}
