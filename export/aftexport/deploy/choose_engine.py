"""Which engine serves a bundle on this machine, and why."""

from dataclasses import dataclass

from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.deploy.build_engine import build, wanted_here
from aftexport.engines import Engine
from aftexport.engines.cuda import device
from aftexport.engines.onnxruntime import VERSION, OnnxRuntimeEngine
from aftexport.engines.tensorrt.engine import TensorrtEngine
from aftexport.errors import EngineError, ParityError, UsageError


@dataclass(frozen=True)
class Choice:
    """A loaded engine.

    Attributes:
        engine: what was chosen.
        reason: what it is and why, as a sentence for people.
        min_tokens: fewest tokens of a document that it takes.
        max_tokens: most of them; None for no bound of its own.
    """

    engine: Engine
    reason: str
    min_tokens: int = 1
    max_tokens: int | None = None


def choose(
    bundle: Bundle,
    asked: str = "auto",
    *,
    threads: int = 0,
    console: Console,
) -> Choice:
    """Loads TensorRT where bundle and machine allow it, else ONNX Runtime.

    An engine that is not there yet is built first, and one that was not yet compared with
    PyTorch is compared.

    Args:
        bundle: what is served.
        asked: ``onnxruntime``, ``tensorrt``, or ``auto``: ONNX Runtime where TensorRT cannot be
            had.
        threads: of ONNX Runtime; see ``OnnxRuntimeEngine``.
        console: where the progress of a build goes.

    Raises:
        UsageError: where TensorRT is asked for and the bundle is for ONNX alone.
        EngineError: where what was asked for cannot be had.
        ParityError: where TensorRT is asked for and is outside tolerance.
    """
    reason = "--engine onnxruntime was given"
    if asked != "onnxruntime":
        try:
            return _tensorrt(bundle, console)
        except (UsageError, EngineError, ParityError) as error:
            if asked == "tensorrt":
                raise
            reason = error.problem.rstrip(".")
    engine = OnnxRuntimeEngine(bundle.model_path, threads=threads)
    note = ""
    if bundle.manifest.engine is not None and bundle.manifest.precision == "bf16":
        note = " It runs the bfloat16 graph in float32."
    return Choice(engine, f"ONNX Runtime {VERSION} on the CPU: {reason}.{note}")


def _tensorrt(bundle: Bundle, console: Console) -> Choice:
    plan = bundle.manifest.engine
    if plan is None:
        raise UsageError(
            "The bundle was exported to ONNX alone.", "Export with --to trt or --to trt-rtx."
        )
    gpu = device()
    file = build(bundle, console=console)
    content, record = file.read(wanted_here(bundle, plan.settings))
    engine = TensorrtEngine(content, record.runtime)
    reason = f"{engine.title} on {gpu}, engine {file.engine}."
    return Choice(engine, reason, engine.min_tokens, engine.max_tokens)
