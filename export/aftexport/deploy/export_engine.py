"""The TensorRT engine of a bundle that is being exported: built here, or left for later."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from aftexport.bundle.bundle import Bundle, engine_file
from aftexport.bundle.manifest import EnginePlan, Manifest
from aftexport.console import escape
from aftexport.deploy.build_engine import gpu_for, make, wanted_here
from aftexport.deploy.engine_table import engine_table
from aftexport.engines.tensorrt.runtimes import EXTRAS, load
from aftexport.engines.tensorrt.settings import BuildSettings, EngineOptions, build_settings
from aftexport.errors import EngineError, UsageError
from aftexport.parity import Comparison

_BFLOAT16 = (
    "The rounding of activations to bfloat16: ONNX Runtime has no bfloat16 products on the CPU, "
    "so it runs the graph with float32 activations."
)


def check_options(
    to: str, options: EngineOptions, *, precision: str, timing_cache: Path | None
) -> None:
    """Refuses what cannot be had, before the model is read.

    Raises:
        UsageError: for an option that ``to`` has no use for, or cannot meet.
        EngineError: where what builds the engine here is not installed.
    """
    if to == "onnx":
        if timing_cache is not None or replace(options, max_length=None) != EngineOptions():
            raise UsageError(
                "An option of an engine was given, and --to onnx builds none.",
                "Add --to trt or --to trt-rtx, or leave the option out.",
            )
        return
    build_settings(to, options, precision=precision, max_tokens=None)
    if to == "trt-rtx":
        if timing_cache is not None:
            raise UsageError(
                "--timing-cache has no meaning with --to trt-rtx, which times no kernels.",
                "Leave it out.",
            )
        load("tensorrt_rtx")


def build_into(
    draft: Bundle,
    settings: BuildSettings,
    *,
    timing_cache: Path | None,
    parity: bool,
    console: Console,
) -> tuple[Manifest, list[Comparison]]:
    """Builds the engine of a bundle that is being written, as far as this machine can.

    Returns:
        The manifest with the engine, and its comparisons with PyTorch; the manifest says
        what waits for another machine, and why.

    Raises:
        EngineError: where the builder refuses the model.
    """
    manifest = draft.manifest
    deferred: tuple[str, ...] = ()
    if manifest.precision == "bf16":
        deferred = (_BFLOAT16,)
    if reasons := _missing(settings):
        deferred = (" ".join(("The engine:", *reasons)), *deferred)
        plan = EnginePlan(settings=settings, file=None, deferred=deferred)
        return manifest.model_copy(update={"engine": plan}), []
    wanted = wanted_here(draft, settings)
    engine, record, results = make(
        draft, wanted, timing_cache=timing_cache, parity=parity, console=console
    )
    file = engine_file(draft.path, settings.runtime)
    file.write(engine, record)
    if record.parity == "checked":
        deferred = ()
    else:
        reason = "no GPU that it runs on is here" if parity else "--no-verify was given"
        deferred = (f"The engine's parity with PyTorch: {reason}.", *deferred)
    plan = EnginePlan(settings=settings, file=file.engine.name, deferred=deferred)
    versions = manifest.versions | {settings.runtime: wanted.version}
    return manifest.model_copy(update={"engine": plan, "versions": versions}), results


def _missing(settings: BuildSettings) -> list[str]:
    """All that this machine lacks to build the engine."""
    reasons = []
    for check in (partial(load, settings.runtime), partial(gpu_for, settings)):
        try:
            check()
        except EngineError as error:
            reasons.append(error.problem)
    return reasons


def show_engine(plan: EnginePlan, bundle: Path, console: Console) -> None:
    """Prints what the engine of a bundle is, and what is left to do for it."""
    runtime = plan.settings.runtime
    if plan.file is not None:
        console.print(engine_table(engine_file(bundle, runtime).read_record()))
    for deferred in plan.deferred:
        console.print(f"[yellow]Deferred:[/] {escape(deferred)}", soft_wrap=True)
    name = escape(str(bundle))
    if plan.file is None:
        console.print(
            f"On a machine with the GPU: pip install 'aftexport\\[{EXTRAS[runtime]}]', then "
            f"aftexport build {name}; aftserve builds it too when it starts.",
            soft_wrap=True,
        )
    elif plan.deferred:
        console.print(
            f"On a machine with the GPU: aftexport build {name} compares it; "
            "aftserve does so too before it answers.",
            soft_wrap=True,
        )
