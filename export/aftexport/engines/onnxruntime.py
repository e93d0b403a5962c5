"""ONNX Runtime: the embedded default."""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native

import aftplugins
from aftexport.engines import Stop, Tensors
from aftexport.engines.cast_graph import has_bfloat16, widen
from aftexport.errors import EngineError, UsageError
from aftexport.onnx_io import read_model, without_links
from aftexport.operators.domain import operators_in
from aftexport.system.cores import usable_cores
from aftexport.system.memory import give_back

# Where this was imported before aftexport, the variable that says so came too late.
onnxruntime.disable_telemetry_events()

VERSION: str = onnxruntime.__version__
_ERRORS = (native.Fail, native.InvalidArgument, native.InvalidGraph, native.InvalidProtobuf,
           native.NotImplemented, native.RuntimeException, native.NoSuchFile,
           RuntimeError, ValueError)  # fmt: skip

Provider = Literal["cpu", "cuda"]
"""An execution provider, which runs what it can; the rest of a model runs on the CPU."""
_CPU: tuple[str, dict[str, str]] = ("CPUExecutionProvider", {})
_PROVIDERS = {
    "cpu": [_CPU],
    # In TF32, its own choice, products in float32 would be further off than fp32 may be.
    "cuda": [("CUDAExecutionProvider", {"use_tf32": "0"}), _CPU],
}
_MOST_THREADS = 1024
"""The runtime would start any number, and take a machine's memory for their stacks."""
_SMALL_BYTES = 1024
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_DISABLED = ["NchwcTransformer", "Pad_Fusion"]
"""Steps of the optimizer that break some graphs; see ``optimizer_faults``. New exports are written
so that they need no such option: it is for earlier exports and for graphs of others."""
_KERNELS: dict[Provider, str] = {"cpu": "onnxruntime", "cuda": "onnxruntime_cuda"}
_SHORTEST: Tensors = {"input_ids": np.zeros((1, 1), np.int64), "lengths": np.ones(1, np.int64)}
_WHERE_CUDA_FAILS = "See that the NVIDIA driver, CUDA and cuDNN are what onnxruntime-gpu asks for."


class OnnxRuntimeEngine:
    """A model in ONNX Runtime, which keeps the memory of its runs for the next; see ``release``.

    Args:
        model: path of ``model.onnx``, or the serialized model.
        threads: of one operator; 0 for ``usable_cores``.
        fused: register the provider's kernel library where it is built.
        provider: the execution provider.
        optimized: let the runtime fuse and rearrange operators.

    Raises:
        EngineError: where the runtime lacks the provider, or refuses the model or the
            kernel library.
    """

    name = "onnxruntime"

    def __init__(
        self,
        model: Path | bytes,
        *,
        threads: int = 0,
        fused: bool = True,
        provider: Provider = "cpu",
        optimized: bool = True,
    ) -> None:
        options = session_options(threads=threads, fused=fused, provider=provider)
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = session(model, options, provider)
        self.input_names = tuple(i.name for i in self._session.get_inputs())

    def run(self, inputs: Tensors, stop: Stop | None = None) -> dict[str, NDArray[np.generic]]:
        """Runs the model once; see ``Engine.run``. A stop takes effect between two operators."""
        options = _run_options()
        # The runtime looks at this before every operator; the session stays usable.
        stopping = (stop or Stop()).ending(partial(setattr, options, "terminate", True))
        try:
            with stopping:
                outputs = self._session.run(None, dict(inputs), options)
        except _ERRORS as error:
            raise EngineError(
                f"ONNX Runtime failed: {_reason(error)}.", "Check the shapes of the inputs."
            ) from error
        names = (o.name for o in self._session.get_outputs())
        return dict(zip(names, outputs, strict=True))

    def release(self) -> None:
        """Gives the memory of earlier runs back; see ``Engine.release``.

        The model is one of documents, with no inputs but ``input_ids`` and ``lengths``.
        """
        options = _run_options()
        # The runtime does so at the end of a run alone; this is the shortest.
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        try:
            self._session.run(None, {name: _SHORTEST[name] for name in self.input_names}, options)
        except _ERRORS as error:
            raise EngineError(
                f"ONNX Runtime cannot give memory back: {_reason(error)}.", "Start it again."
            ) from error
        give_back()


def _run_options() -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # a failure is raised, and a stop is none
    return options


def session_options(
    *, threads: int, fused: bool, provider: Provider = "cpu"
) -> onnxruntime.SessionOptions:
    """The options of every session here; see ``OnnxRuntimeEngine``.

    Raises:
        UsageError: for more threads than any machine has.
        EngineError: where the runtime refuses the kernel library.
    """
    options = onnxruntime.SessionOptions()
    if threads > _MOST_THREADS:
        raise UsageError(f"{threads:,} threads are too many.", f"Give {_MOST_THREADS:,} or less.")
    options.intra_op_num_threads = threads or usable_cores()
    options.log_severity_level = 3
    # Its threads would spin for 45 ms after each run, on cores that others need.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Without an arena a long document would have every page of its memory cleared anew.
    options.enable_cpu_mem_arena = True
    # The one block of a pattern is larger than what tensors take that have memory in turn.
    options.enable_mem_pattern = False
    if fused and (library := aftplugins.library(_KERNELS[provider])) is not None:
        try:
            options.register_custom_ops_library(str(library))
        except _ERRORS as error:
            raise EngineError(
                f"{library}: ONNX Runtime {VERSION} cannot load the kernels ({_reason(error)}).",
                "Unset the environment variable if the message names one; or install aftexport "
                "again, so that they are built for this machine.",
            ) from error
    return options


def session(
    model: Path | bytes, options: onnxruntime.SessionOptions, provider: Provider = "cpu"
) -> onnxruntime.InferenceSession:
    """Loads a model; raises EngineError where the runtime lacks the provider or refuses it.

    It has no bfloat16 products on the CPU, so such a graph runs in float32.
    """
    providers = _PROVIDERS[provider]
    name = providers[0][0]
    if name not in onnxruntime.get_available_providers():
        raise EngineError(
            f"ONNX Runtime {VERSION} has no {name}.",
            "Run: pip uninstall onnxruntime; pip install onnxruntime-gpu.",
        )
    try:
        if isinstance(model, Path):
            source = _source(model, options)
        else:
            # Where it names files of weights, the runtime would look in the current folder.
            options.add_session_config_entry(_WEIGHTS_FOLDER, os.devnull)
            source = model
        if isinstance(model, Path) and _is_bfloat16(model):
            wide = read_model(model)
            widen(wide)
            source = wide.SerializeToString()
        # A provider that cannot start would be replaced by the CPU.
        loaded = onnxruntime.InferenceSession(
            source,
            options,
            providers=providers,
            enable_fallback=0,
            disabled_optimizers=_DISABLED,
        )
    except _ERRORS as error:
        raise EngineError(
            f"ONNX Runtime {VERSION} cannot load the model: {_reason(error)}.",
            "Export it again, with a lower --opset if the message names one."
            if provider == "cpu"
            else _WHERE_CUDA_FAILS,
        ) from error
    if name not in loaded.get_providers():
        raise EngineError(f"{name} of ONNX Runtime {VERSION} cannot start.", _WHERE_CUDA_FAILS)
    return loaded


def _source(model: Path, options: onnxruntime.SessionOptions) -> str | bytes:
    """The path; or the model, where the runtime cannot be told the path or does not follow links.

    It takes UTF-8, and weights within the folder of the model alone.
    """
    path = str(model)
    try:
        path.encode()
    except UnicodeEncodeError:  # a name in Linux is any bytes
        return model.read_bytes()
    try:
        without = without_links(model)
    except (OSError, DecodeError):
        return path  # the runtime says better what is wrong with the file
    if without is None:
        return path
    located, folder = without
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder))
    return bytes(located.SerializeToString())


def _is_bfloat16(model: Path) -> bool:
    try:
        return has_bfloat16(onnx.load(model, load_external_data=False))
    except (OSError, DecodeError):
        return False  # the runtime says better what is wrong with the file


def operator_paths(model: Path, *, provider: Provider = "cpu") -> dict[str, str]:
    """Tells which way each custom operator of a model runs: ``fused`` or ``portable``.

    The runtime replaces a node by its portable body where no kernel is
    registered, so the nodes left in its optimized graph are those that run fused.

    Raises:
        EngineError: where the runtime refuses the model or the kernel library.
    """
    bare = _without_weights(onnx.load(model, load_external_data=False))
    before = operators_in(bare)
    if has_bfloat16(bare):
        widen(bare)
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        options = session_options(threads=1, fused=True, provider=provider)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.optimized_model_filepath = str(optimized)
        session(bare.SerializeToString(), options, provider)
        left = operators_in(onnx.load(optimized))
    return {
        op_type: "fused" if left[op_type] == count else "portable"
        for op_type, count in before.items()
    }


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Makes inputs of a model's weights, for the choice of kernels goes by types alone."""
    graph = model.graph
    weights = list(graph.initializer)
    del graph.initializer[:]
    for tensor in weights:
        if tensor.ByteSize() < _SMALL_BYTES and tensor.data_location != tensor.EXTERNAL:
            graph.initializer.append(tensor)  # a shape, axes or the like
        elif all(value.name != tensor.name for value in graph.input):
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(info)
    return model


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rpartition(" : ")[2].strip().rstrip(".")
