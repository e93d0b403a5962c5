"""Sessions of ONNX Runtime."""

from pathlib import Path

from aftexport.engines.onnxruntime.failures import FAILURES, is_graph_fault, load_remedy, reason
from aftexport.engines.onnxruntime.package import VERSION, onnxruntime
from aftexport.engines.onnxruntime.providers import PROVIDERS, Provider
from aftexport.engines.onnxruntime.session_model import Adaptation, session_source
from aftexport.errors import EngineError, UsageError
from aftexport.system.cores import usable_cores

_MAX_THREADS = 1024
"""Limit of threads: the runtime would start any number, whose stacks could fill the memory."""
_DISABLED = ["NchwcTransformer", "Pad_Fusion"]
"""Optimizer passes that break some graphs; see ``optimizer_faults``. New exports do not need this
option; it is for earlier exports and for other graphs."""
_CUDA_REMEDY = "Install the NVIDIA driver, CUDA and cuDNN versions that onnxruntime-gpu requires."


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
    except FAILURES as error:
        raise EngineError(
            f"{library}: ONNX Runtime {VERSION} cannot load the kernels ({reason(error)}).",
            "Unset the environment variable if the message names one. Otherwise install "
            "aftexport again to build the kernels for this machine.",
        ) from error


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
        fused: whether the provider's kernel library is registered, if it is built, and the bodies
            of the other operators become those for the provider.
        takes_choice: whether a file's choice of the logits to explain becomes an input.

    Raises:
        EngineError: if the runtime lacks the provider, or refuses the model or the
            kernel library.
    """
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
        source = session_source(model, options, adapted)
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
