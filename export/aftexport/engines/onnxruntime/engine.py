"""A model in ONNX Runtime."""

import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.engines import Stop, Tensors
from aftexport.engines.cast_graph import has_bfloat16, widen
from aftexport.engines.onnxruntime.package import onnxruntime
from aftexport.engines.onnxruntime.providers import PROVIDERS, Provider
from aftexport.engines.onnxruntime.sessions import (
    FAILURES,
    is_out_of_memory,
    padded_choices,
    reason,
    session,
    session_options,
)
from aftexport.errors import EngineError
from aftexport.operators.domain import DOMAIN, operators_in
from aftexport.operators.portable_bodies import choose_kernels
from aftexport.system.contract import EXPLAINED, LENGTHS
from aftexport.system.onnx_files import without_weights
from aftexport.system.process import give_back

_CHOICE_OF_FILE = padded_choices([()])
"""The input for a run without a choice of logits: the largest one, as the file has it."""
_MEMORY_REMEDY = "Send shorter documents or fewer, or lower --memory-budget-mib."
_TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}
"""The types of a model's inputs by ONNX Runtime's names."""


class OnnxRuntimeEngine:
    """A model in ONNX Runtime, which keeps memory between runs; see ``release``."""

    name = "onnxruntime"

    def __init__(
        self,
        model: Path | bytes,  # path of `model.onnx`, or the serialized model
        *,
        folder: Path | None = None,  # folder with the weights of a serialized model outside it
        threads: int = 0,  # number of threads per operator; 0 for `usable_cores`
        fused: bool = True,
        provider: Provider = "cpu",
        optimized: bool = True,  # whether the runtime may fuse and rearrange operators
    ) -> None:
        options = session_options(threads)
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = session(
            model, options, provider, folder=folder, fused=fused, takes_choice=True
        )
        self._arenas = PROVIDERS[provider].arenas
        names = [i.name for i in self._session.get_inputs()]
        self.takes_choice = EXPLAINED in names
        self.input_names = tuple(name for name in names if name != EXPLAINED)
        self._output_names = tuple(o.name for o in self._session.get_outputs())

    def run(
        self, inputs: Tensors, stop: Stop | None = None, outputs: Collection[str] | None = None
    ) -> dict[str, NDArray[np.generic]]:
        """Run the model once; see ``Engine.run``. A stop takes effect between two operators.

        The runtime computes all outputs, and frees the others at once.
        """
        options = _run_options()
        # The runtime checks this option before every operator; the session stays usable.
        stopping = (stop or Stop()).ending(partial(setattr, options, "terminate", True))
        names = [name for name in self._output_names if outputs is None or name in outputs]
        try:
            with stopping:
                results = self._session.run(names, self._with_choice(inputs), options)
        except FAILURES as error:
            raise EngineError(
                f"ONNX Runtime failed: {reason(error)}.",
                _MEMORY_REMEDY if is_out_of_memory(error) else "Check the shapes of the inputs.",
            ) from error
        return dict(zip(names, results, strict=True))

    def release(self) -> None:
        """Return the memory of earlier runs to the system; see ``Engine.release``."""
        options = _run_options()
        # The runtime only shrinks its arenas at the end of a run; this is the shortest run.
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", self._arenas)
        try:
            self._session.run(None, self._with_choice(self._shortest()), options)
        except FAILURES as error:
            raise EngineError(
                f"ONNX Runtime cannot release memory: {reason(error)}.", "Restart the process."
            ) from error
        give_back()

    def _with_choice(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Add the choice of the file, the largest logit, unless the inputs have another."""
        if not self.takes_choice or EXPLAINED in inputs:
            return dict(inputs)
        return {**inputs, EXPLAINED: _CHOICE_OF_FILE}

    def _shortest(self) -> Tensors:
        """Return the inputs for one document of one token."""
        inputs: dict[str, NDArray[np.generic]] = {}
        for value in self._session.get_inputs():
            shape = [size if isinstance(size, int) else 1 for size in value.shape]
            inputs[value.name] = np.zeros(shape, _TYPES[value.type])
        return inputs | ({LENGTHS: np.ones(1, np.int64)} if LENGTHS in inputs else {})


def _run_options() -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # failures are raised, and a stop is not a failure
    return options


def operator_paths(model: Path, *, provider: Provider = "cpu") -> dict[str, str]:
    """Return the path of each custom operator and form of a model: ``fused`` or ``portable``."""
    bare = without_weights(onnx.load(model, load_external_data=False))
    written = [node.op_type for node in _custom_nodes(bare)]
    if has_bfloat16(bare):
        widen(bare)
    chosen = PROVIDERS[provider]
    if chosen.kernels:
        choose_kernels(bare, chosen.library)
    served = [node.op_type for node in _custom_nodes(bare)]
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        options = session_options(threads=1)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.optimized_model_filepath = str(optimized)
        session(bare.SerializeToString(), options, provider, fused=True)
        left = operators_in(onnx.load(optimized))
    # The runtime replaces a node by its portable body if no kernel is registered. So the nodes that
    # remain in its optimized graph run fused, and a form is fused if all of its nodes are.
    before = operators_in(bare)
    # Nodes of one form may differ in a number such as eps, which decides about the kernel as well.
    fused: dict[str, bool] = {}
    for op_type, name in zip(written, served, strict=True):
        fused[op_type] = fused.get(op_type, True) and left[name] == before[name]
    return {op_type: "fused" if fused[op_type] else "portable" for op_type in sorted(fused)}


def _custom_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain == DOMAIN]


_RUNS = 3


def operator_shares(
    model: Path | bytes, inputs: Tensors, *, threads: int = 0, fused: bool = True
) -> dict[str, float]:
    """Return the share of each operator type in the time of the fastest run, the largest first."""
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
