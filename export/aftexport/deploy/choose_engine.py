"""The choice of the engine that serves a bundle on this machine."""

from dataclasses import dataclass, replace

from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.deploy.build_engine import build, wanted_here
from aftexport.engines import Engine
from aftexport.engines.cuda import device
from aftexport.engines.onnxruntime import PROVIDERS, VERSION, OnnxRuntimeEngine, Provider
from aftexport.engines.tensorrt.engine import TensorrtEngine
from aftexport.errors import EngineError, ParityError, UsageError


@dataclass(frozen=True)
class ChosenEngine:
    """A loaded engine and the reason of its choice."""

    engine: Engine
    reason: str  # engine and reason of the choice, as a sentence
    min_tokens: int = 1  # minimum tokens of a document
    max_tokens: int | None = None  # maximum tokens of a document; None if the engine has no bound


def choose_engine(
    bundle: Bundle,
    asked: str = "auto",
    *,
    threads: int = 0,  # number of threads of ONNX Runtime; see `OnnxRuntimeEngine`
    provider: Provider = "cpu",
    console: Console,
) -> ChosenEngine:
    """Load TensorRT if the bundle and the machine allow it, else ONNX Runtime.

    A missing engine is built first. An engine that was not compared with PyTorch yet is
    compared.

    Raises:
        UsageError: if TensorRT is requested and the bundle was exported only to ONNX, or a
            provider other than the CPU was requested with it.
        EngineError: if the requested engine or provider is not available, or its kernels are
            missing on a GPU.
        ParityError: if TensorRT is requested and is outside tolerance.
    """
    if asked == "tensorrt" and provider != "cpu":
        raise UsageError(
            f"Expected --engine onnxruntime with --provider {provider}, got --engine tensorrt.",
            "Leave out --provider, or give --engine onnxruntime.",
        )
    reason = "--engine onnxruntime was given"
    if asked != "onnxruntime":
        try:
            chosen = _tensorrt(bundle, console)
            return chosen if provider == "cpu" else _without_provider(chosen, provider)
        except (UsageError, EngineError, ParityError) as error:
            if asked == "tensorrt":
                raise
            reason = error.problem.rstrip(".")
    PROVIDERS[provider].check()
    PROVIDERS[provider].check_kernels(bundle.manifest.operators)
    engine = OnnxRuntimeEngine(bundle.model_path, threads=threads, provider=provider)
    note = ""
    if bundle.manifest.engine is not None and bundle.manifest.precision == "bf16":
        note = " It runs the bfloat16 graph in float32."
    place = "the CPU" if provider == "cpu" else PROVIDERS[provider].name
    return ChosenEngine(engine, f"ONNX Runtime {VERSION} on {place}: {reason}.{note}")


def _without_provider(chosen: ChosenEngine, provider: Provider) -> ChosenEngine:
    """Say in the reason that TensorRT does not use the requested provider."""
    note = f"--provider {provider} has no effect without --engine onnxruntime."
    return replace(chosen, reason=f"{chosen.reason} {note}")


def _tensorrt(bundle: Bundle, console: Console) -> ChosenEngine:
    plan = bundle.manifest.engine
    if plan is None:
        raise UsageError(
            "The bundle was exported only to ONNX.", "Export with --to trt or --to trt-rtx."
        )
    gpu = device()
    file = build(bundle, console=console)
    content, record = file.read(wanted_here(bundle, plan.settings))
    engine = TensorrtEngine(content, record.runtime, uses_plugins=record.uses_plugins)
    reason = f"{engine.title} on {gpu}, engine {file.engine}."
    return ChosenEngine(engine, reason, engine.min_tokens, engine.max_tokens)
