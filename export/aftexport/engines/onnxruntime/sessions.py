"""Sessions of ONNX Runtime: their options, the model that one loads, and its errors."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from aftexport.engines.aft_full_product import use_products
from aftexport.engines.cast_graph import has_bfloat16, widen
from aftexport.engines.onnxruntime.package import VERSION, native, onnxruntime
from aftexport.engines.onnxruntime.providers import PROVIDERS, ExecutionProvider, Provider
from aftexport.errors import EngineError, UsageError
from aftexport.operators.domain import DOMAIN
from aftexport.operators.portable_bodies import choose_kernels
from aftexport.system.contract import EXPLAINED, largest
from aftexport.system.onnx_files import is_unicode, read_model, without_links
from aftexport.system.process import usable_cores

_MAX_THREADS = 1024
"""Limit of threads: the runtime would start any number, whose stacks could fill the memory."""
_DISABLED = ["NchwcTransformer", "Pad_Fusion"]
"""Optimizer passes that break some graphs; see ``optimizer_faults``. New exports do not need this
option; it is for earlier exports and for other graphs."""
_CUDA_REMEDY = "Install the NVIDIA driver, CUDA and cuDNN versions that onnxruntime-gpu requires."


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """Return the options of one ``session``."""
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
    except FAILURES as error:
        raise EngineError(
            f"{library}: ONNX Runtime {VERSION} cannot load the kernels ({reason(error)}).",
            "Unset the environment variable if the message names one. Otherwise install "
            "aftexport again to build the kernels for this machine.",
        ) from error


def session(
    model: Path | bytes,
    options: onnxruntime.SessionOptions,  # result of `session_options`, for this session only
    provider: Provider = "cpu",
    *,
    folder: Path | None = None,  # folder with the weights of a serialized model outside it
    fused: bool,
    takes_choice: bool = False,
) -> onnxruntime.InferenceSession:
    """Load a model; bfloat16 graphs run in float32, as the CPU has no bfloat16 products."""
    chosen = PROVIDERS[provider]
    chosen.check()
    if kernels := chosen.kernels if fused else None:
        _register(kernels, options)
    adapted = Adaptation(
        library=chosen.library if kernels else None,
        takes_choice=takes_choice,
        provider=chosen if fused else None,
    )
    try:
        source = session_source(model, options, adapted, folder)
        # With fallback enabled, the CPU would replace a provider that cannot start.
        loaded = onnxruntime.InferenceSession(
            source,
            options,
            providers=chosen.entries,
            enable_fallback=0,
            disabled_optimizers=_DISABLED,
        )
    except FAILURES as error:
        place = f" on {chosen.name}" if chosen.needs_gpu else ""
        raise EngineError(
            f"ONNX Runtime {VERSION} cannot load the model{place}: {reason(error)}.",
            _CUDA_REMEDY if chosen.needs_gpu and not is_graph_fault(error) else load_remedy(error),
        ) from error
    if chosen.name not in (started := loaded.get_providers()):
        raise EngineError(
            f"Expected {chosen.name} of ONNX Runtime {VERSION} to start, got only "
            f"{' and '.join(started)}.",
            _CUDA_REMEDY,
        )
    return loaded


_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_MAX_CONSTANT_BYTES = "optimization.constant_folding_max_output_size_in_bytes"


@dataclass(frozen=True)
class Adaptation:
    """The changes of a model for a session."""

    # name of the kernel library; None if there is none. The nodes that the kernels do not take run
    # by their bodies
    library: str | None
    takes_choice: bool  # whether a file's choice of the logits to explain becomes an input
    # execution provider whose bodies replace those of the file; None for those of the file
    provider: ExecutionProvider | None

    def choose_bodies(self, model: onnx.ModelProto, options: onnxruntime.SessionOptions) -> bool:
        """Give the nodes the names that the kernels take, and the others the provider's bodies."""
        # Forms of new nodes get the names of kernels. Bodies for the provider come first: a node
        # that the kernels do not take gets another name.
        is_cuda = self.library == PROVIDERS["cuda"].library
        has_products = is_cuda and use_products(model, PROVIDERS["cuda"].library)
        if has_products:
            # With the default of 1 GiB, 1.31 computes the weights of a long AFT-full in each run.
            options.add_session_config_entry(_MAX_CONSTANT_BYTES, "0")  # no limit
        is_rewritten = self.provider is not None and self.provider.adapt(model)
        is_renamed = self.library is not None and choose_kernels(model, self.library)
        return has_products or is_renamed or is_rewritten


def session_source(
    model: Path | bytes,
    options: onnxruntime.SessionOptions,
    adaptation: Adaptation,
    folder: Path | None = None,
) -> str | bytes:
    """Return the path or the serialized model that a session loads."""
    if isinstance(model, Path):
        return _adapted_file(model, options, adaptation)
    # Without a folder, the runtime would look for files of weights in the current one.
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder or os.devnull))
    return _adapted_bytes(model, options, adaptation)


def _adapted_bytes(
    model: bytes, options: onnxruntime.SessionOptions, adaptation: Adaptation
) -> bytes:
    if DOMAIN.encode() not in model:
        return model
    try:
        parsed = onnx.load_from_string(model)
    except DecodeError:
        return model  # the runtime reports the fault of the file more precisely
    return bytes(parsed.SerializeToString()) if adaptation.choose_bodies(parsed, options) else model


def _adapted_file(
    path: Path, options: onnxruntime.SessionOptions, adaptation: Adaptation
) -> str | bytes:
    """Return the path, or the adapted model: in float32 instead of bfloat16, and as asked for."""
    source = _source(path, options)
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
    has_choice = adaptation.takes_choice and take_choice(model)
    has_other_bodies = adaptation.choose_bodies(model, options)
    if not (is_wide or has_choice or has_other_bodies):
        return source
    if isinstance(source, str):
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent))
    return bytes(model.SerializeToString())


def _source(model: Path, options: onnxruntime.SessionOptions) -> str | bytes:
    """Return the path, or the serialized model if the runtime cannot open the path."""
    # The runtime only takes paths in UTF-8, and only weights within the model's folder.
    path = str(model)
    if not is_unicode(model):
        return bytes(read_model(model).SerializeToString())
    try:
        without = without_links(model)
    except (OSError, DecodeError):
        return path  # the runtime reports the fault of the file more precisely
    if without is None:
        return path
    located, folder = without
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder))
    return bytes(located.SerializeToString())


FAILURES = (native.Fail, native.InvalidArgument, native.InvalidGraph, native.InvalidProtobuf,
            native.NotImplemented, native.RuntimeException, native.NoSuchFile,
            RuntimeError, ValueError)  # fmt: skip

_GRAPH_FAULTS = (native.InvalidGraph, native.InvalidProtobuf, native.NotImplemented)
_OUT_OF_MEMORY = ("Failed to allocate memory", "bad_alloc", "out of memory")


def is_graph_fault(error: Exception) -> bool:
    """Return whether the model caused a failure, whatever the machine has."""
    return isinstance(error, _GRAPH_FAULTS)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed."""
    return any(text in str(error) for text in _OUT_OF_MEMORY)


def reason(error: Exception) -> str:
    """Return the first line of an exception without the codes before it."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rpartition(" : ")[2].strip().rstrip(".")


def load_remedy(error: Exception) -> str:
    """Return the remedy for a model that ONNX Runtime refuses to load."""
    text = reason(error)
    if "opset" in text.lower():
        return "Export it again with a lower --opset."
    if "implementation" in text or (is_graph_fault(error) and "node" in text.lower()):
        return "Write the operator in this message in others, or in float32, and export again."
    return "Export it again."


def take_choice(model: onnx.ModelProto) -> bool:
    """Turn the constant ``EXPLAINED`` of a model into an input; return whether it has one."""
    graph = model.graph
    place = next((i for i, t in enumerate(graph.initializer) if t.name == EXPLAINED), None)
    if place is None:
        return False
    del graph.initializer[place]
    # In a file, the choice is a constant: other runtimes would require an input, and this one warns
    # of an input that has an initializer.
    # Without names of axes: the runtime may reuse the memory of values with equal names.
    axes = [None, None]
    graph.input.append(onnx.helper.make_tensor_value_info(EXPLAINED, onnx.TensorProto.INT64, axes))
    return True


def padded_choices(choices: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the input for the choices of several documents, or for one choice for all of them."""
    width = max(1, *map(len, choices))
    padded = np.full((len(choices), width), largest(0))
    for row, choice in zip(padded, choices, strict=True):
        row[: len(choice)] = choice
    return padded
