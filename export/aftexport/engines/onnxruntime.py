"""ONNX Runtime, the default engine."""

import os
import tempfile
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

import aftplugins
from aftexport.contract import EXPLAINED, LENGTHS
from aftexport.engines import Stop, Tensors
from aftexport.engines.aft_full_product import use_products
from aftexport.engines.cast_graph import has_bfloat16, widen
from aftexport.engines.explained_input import padded_choices, take_choice
from aftexport.engines.onnxruntime_package import native, onnxruntime
from aftexport.errors import EngineError, UsageError
from aftexport.onnx_io import read_model, without_links
from aftexport.operators.domain import DOMAIN, operators_in
from aftexport.operators.kernel_forms import choose_kernels
from aftexport.system.cores import usable_cores
from aftexport.system.installation import install_command
from aftexport.system.memory import give_back

VERSION: str = onnxruntime.__version__
_ERRORS = (native.Fail, native.InvalidArgument, native.InvalidGraph, native.InvalidProtobuf,
           native.NotImplemented, native.RuntimeException, native.NoSuchFile,
           RuntimeError, ValueError)  # fmt: skip

Provider = Literal["cpu", "cuda"]
"""An execution provider. Operators that it does not support run on the CPU."""
_CPU: tuple[str, dict[str, str]] = ("CPUExecutionProvider", {})
_PROVIDERS = {
    "cpu": [_CPU],
    # TF32, the provider's default, would exceed the tolerance of fp32.
    "cuda": [("CUDAExecutionProvider", {"use_tf32": "0"}), _CPU],
}
_MAX_THREADS = 1024
"""Limit of threads: the runtime would start any number, whose stacks could fill the memory."""
_SMALL_BYTES = 1024
_CHOICE_OF_FILE = padded_choices([()])
"""The input for a run without a choice of logits: the largest one, as the file has it."""
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_DISABLED = ["NchwcTransformer", "Pad_Fusion"]
"""Optimizer passes that break some graphs; see ``optimizer_faults``. New exports do not need this
option; it is for earlier exports and for other graphs."""
_TYPES = {
    "tensor(int64)": np.int64,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}
"""The types of a model's inputs by ONNX Runtime's names."""
KERNELS: dict[Provider, str] = {"cpu": "onnxruntime", "cuda": "onnxruntime_cuda"}
"""The library of fused kernels for each provider, see ``aftplugins.RUNTIMES``."""
_CUDA_REMEDY = "Install the NVIDIA driver, CUDA and cuDNN versions that onnxruntime-gpu requires."


class OnnxRuntimeEngine:
    """A model in ONNX Runtime, which keeps memory between runs; see ``release``.

    Args:
        model: path of ``model.onnx``, or the serialized model.
        threads: number of threads per operator; 0 for ``usable_cores``.
        fused: whether the provider's kernel library is registered, if it is built.
        provider: the execution provider.
        optimized: whether the runtime may fuse and rearrange operators.

    Raises:
        EngineError: if the runtime lacks the provider, or refuses the model or the
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
        options = session_options(threads)
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = session(model, options, provider, fused=fused, takes_choice=True)
        names = [i.name for i in self._session.get_inputs()]
        self.takes_choice = EXPLAINED in names
        self.input_names = tuple(name for name in names if name != EXPLAINED)
        self._output_names = tuple(o.name for o in self._session.get_outputs())

    def run(
        self,
        inputs: Tensors,
        stop: Stop | None = None,
        outputs: Collection[str] | None = None,
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
        except _ERRORS as error:
            raise EngineError(
                f"ONNX Runtime failed: {_reason(error)}.", "Check the shapes of the inputs."
            ) from error
        return dict(zip(names, results, strict=True))

    def release(self) -> None:
        """Return the memory of earlier runs to the system; see ``Engine.release``."""
        options = _run_options()
        # The runtime only shrinks its arena at the end of a run; this is the shortest run.
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        try:
            self._session.run(None, self._with_choice(self._shortest()), options)
        except _ERRORS as error:
            raise EngineError(
                f"ONNX Runtime cannot release memory: {_reason(error)}.", "Restart the process."
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


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """Return the options of one ``session``.

    Args:
        threads: number of threads per operator; 0 for ``usable_cores``.

    Raises:
        UsageError: if there are more threads than ``_MAX_THREADS``.
    """
    options = onnxruntime.SessionOptions()
    if threads > _MAX_THREADS:
        raise UsageError(
            f"threads must be at most {_MAX_THREADS:,}, got {threads:,}.",
            f"Give {_MAX_THREADS:,} or less.",
        )
    options.intra_op_num_threads = threads or usable_cores()
    options.log_severity_level = 3
    # Without this, threads spin for 45 ms after each run on cores that other work needs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Without an arena, the system would clear every page again for each long document.
    options.enable_cpu_mem_arena = True
    # A memory pattern allocates one block, which is larger than tensors that reuse memory.
    options.enable_mem_pattern = False
    return options


def _register(library: Path, options: onnxruntime.SessionOptions) -> None:
    try:
        options.register_custom_ops_library(str(library))
    except _ERRORS as error:
        raise EngineError(
            f"{library}: ONNX Runtime {VERSION} cannot load the kernels ({_reason(error)}).",
            "Unset the environment variable if the message names one. Otherwise install "
            "aftexport again to build the kernels for this machine.",
        ) from error


def _kernels(provider: Provider, fused: bool) -> Path | None:
    """Return the provider's kernel library if it is built and ``fused``."""
    return aftplugins.library(KERNELS[provider]) if fused else None


def session(
    model: Path | bytes,
    options: onnxruntime.SessionOptions,
    provider: Provider = "cpu",
    *,
    fused: bool,
    takes_choice: bool = False,
) -> onnxruntime.InferenceSession:
    """Load a model.

    ONNX Runtime has no bfloat16 products on the CPU, so bfloat16 graphs run in float32.

    Args:
        model: path of ``model.onnx``, or the serialized model.
        options: the result of ``session_options``, for this session only.
        provider: the execution provider.
        fused: whether the provider's kernel library is registered, if it is built.
        takes_choice: whether a file's choice of the logits to explain becomes an input.

    Raises:
        EngineError: if the runtime lacks the provider, or refuses the model or the
            kernel library.
    """
    library = None
    if kernels := _kernels(provider, fused):
        _register(kernels, options)
        library = KERNELS[provider]
    providers = _PROVIDERS[provider]
    name = providers[0][0]
    if name not in onnxruntime.get_available_providers():
        raise EngineError(
            f"ONNX Runtime {VERSION} has no {name}.",
            f"Run: pip uninstall --yes onnxruntime; then {install_command('cuda')}.",
        )
    try:
        if isinstance(model, Path):
            source = _source(model, options)
        else:
            # Otherwise the runtime would look for files of weights in the current folder.
            options.add_session_config_entry(_WEIGHTS_FOLDER, os.devnull)
            source = _with_kernels(model, library)
        if isinstance(model, Path):
            source = _adapted(source, model, options, takes_choice, library)
        # With fallback enabled, the CPU would replace a provider that cannot start.
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
            else _CUDA_REMEDY,
        ) from error
    if name not in loaded.get_providers():
        raise EngineError(f"{name} of ONNX Runtime {VERSION} cannot start.", _CUDA_REMEDY)
    return loaded


def _source(model: Path, options: onnxruntime.SessionOptions) -> str | bytes:
    """Return the path, or the serialized model if the runtime cannot open the path.

    The runtime only takes paths in UTF-8, and only weights within the model's folder.
    """
    path = str(model)
    try:
        path.encode()
    except UnicodeEncodeError:  # file names on Linux may contain any bytes
        return model.read_bytes()
    try:
        without = without_links(model)
    except (OSError, DecodeError):
        return path  # the runtime reports the fault of the file more precisely
    if without is None:
        return path
    located, folder = without
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder))
    return bytes(located.SerializeToString())


def _with_kernels(model: bytes, library: str | None) -> bytes:
    """Return a serialized model in which the nodes have the names that the kernels take."""
    if library is None or DOMAIN.encode() not in model:
        return model
    try:
        parsed = onnx.load_from_string(model)
    except DecodeError:
        return model  # the runtime reports the fault of the file more precisely
    if not _fit_to_kernels(parsed, library):
        return model
    return bytes(parsed.SerializeToString())


def _fit_to_kernels(model: onnx.ModelProto, library: str) -> bool:
    """Change a model in place to the nodes that the kernels take; return whether it changed."""
    has_products = library == KERNELS["cuda"] and use_products(model, library)
    return choose_kernels(model, library) or has_products


def _adapted(
    source: str | bytes,
    path: Path,
    options: onnxruntime.SessionOptions,
    takes_choice: bool,
    library: str | None,
) -> str | bytes:
    """Return a model in float32 instead of bfloat16 and, if it should, with ``take_choice``.

    The nodes that the kernels do not take run by their bodies.

    Args:
        source: the result of ``_source``.
        path: path of the model.
        options: the options of the session, which get the folder of the weights.
        takes_choice: see ``session``.
        library: the name of the kernel library; None if there is none.
    """
    try:
        if isinstance(source, str):
            model = onnx.load(source, load_external_data=False)
        else:
            model = onnx.load_from_string(source)
    except (OSError, DecodeError):
        return source  # the runtime reports the fault of the file more precisely
    is_wide = has_bfloat16(model)
    if is_wide:
        model = read_model(path)
        widen(model)
    is_fitted = library is not None and _fit_to_kernels(model, library)
    if not (takes_choice and take_choice(model)) and not is_wide and not is_fitted:
        return source
    if isinstance(source, str):
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent))
    return bytes(model.SerializeToString())


def operator_paths(model: Path, *, provider: Provider = "cpu") -> dict[str, str]:
    """Return the path of each custom operator and form of a model: ``fused`` or ``portable``.

    A form is fused only if all of its nodes are.

    The runtime replaces a node by its portable body if no kernel is registered.
    So the nodes that remain in its optimized graph run fused.

    Raises:
        EngineError: if the runtime refuses the model or the kernel library.
    """
    bare = _without_weights(onnx.load(model, load_external_data=False))
    written = [node.op_type for node in _custom_nodes(bare)]
    if has_bfloat16(bare):
        widen(bare)
    if _kernels(provider, fused=True):
        choose_kernels(bare, KERNELS[provider])
    served = [node.op_type for node in _custom_nodes(bare)]
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        options = session_options(threads=1)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.optimized_model_filepath = str(optimized)
        session(bare.SerializeToString(), options, provider, fused=True)
        left = operators_in(onnx.load(optimized))
    before = operators_in(bare)
    # Nodes of one form may differ in a number such as eps, which decides about the kernel as well.
    fused: dict[str, bool] = {}
    for op_type, name in zip(written, served, strict=True):
        fused[op_type] = fused.get(op_type, True) and left[name] == before[name]
    return {op_type: "fused" if fused[op_type] else "portable" for op_type in sorted(fused)}


def _custom_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain == DOMAIN]


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace a model's weights by inputs: the choice of kernels depends only on types."""
    graph = model.graph
    weights = list(graph.initializer)
    del graph.initializer[:]
    for tensor in weights:
        if tensor.ByteSize() < _SMALL_BYTES and tensor.data_location != tensor.EXTERNAL:
            graph.initializer.append(tensor)  # small constants such as shapes and axes
        elif all(value.name != tensor.name for value in graph.input):
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(info)
    return model


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rpartition(" : ")[2].strip().rstrip(".")
