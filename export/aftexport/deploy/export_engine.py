"""The TensorRT engine of a bundle during the export: built here, or deferred."""

from functools import partial
from pathlib import Path

from rich.console import Console

from aftexport.bundle.bundle import Bundle, engine_file
from aftexport.bundle.manifest import EnginePlan, Manifest
from aftexport.deploy.build_engine import engine_table, gpu_for, make, wanted_here
from aftexport.engines.tensorrt.runtimes import EXTRAS, load
from aftexport.engines.tensorrt.settings import BuildSettings, build_settings
from aftexport.errors import EngineError, UsageError
from aftexport.options import EngineOptions, ExportOptions
from aftexport.parity import Comparison
from aftexport.system.console import escape
from aftexport.system.installation import install_command

_BFLOAT16 = (
    "The rounding of activations to bfloat16: ONNX Runtime has no bfloat16 products on the CPU, "
    "so it runs the graph with float32 activations."
)


def check_options(options: ExportOptions) -> None:
    """Check the options of an engine before the model is read.

    Raises:
        UsageError: if ``to`` does not use an option, or does not support its value.
        EngineError: if the runtime that builds the engine here is not installed.
    """
    to = options.to
    if to == "onnx":
        if options.timing_cache is not None or options.engine != EngineOptions():
            raise UsageError(
                "Engine options need --to trt or --to trt-rtx, got --to onnx.",
                "Choose one of these targets, or leave the option out.",
            )
        return
    build_settings(to, options.engine, precision=options.precision, max_tokens=options.max_length)
    if to == "trt-rtx":
        if options.timing_cache is not None:
            raise UsageError(
                "--timing-cache needs --to trt, got --to trt-rtx, which does not time kernels.",
                "Leave --timing-cache out.",
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
    """Build the engine of an unfinished bundle, as far as this machine can.

    Returns:
        The manifest with the engine, and the comparisons with PyTorch. The manifest lists
        the steps that are deferred to another machine, with the reasons.

    Raises:
        EngineError: if the builder refuses the model.
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
        reason = "this machine has no GPU for it" if parity else "--no-verify was given"
        deferred = (f"The engine's parity with PyTorch: {reason}.", *deferred)
    plan = EnginePlan(settings=settings, file=file.engine.name, deferred=deferred)
    versions = manifest.versions | {settings.runtime: wanted.version}
    return manifest.model_copy(update={"engine": plan, "versions": versions}), results


def _missing(settings: BuildSettings) -> list[str]:
    """Return the reasons why this machine cannot build the engine."""
    reasons = []
    for check in (partial(load, settings.runtime), partial(gpu_for, settings)):
        try:
            check()
        except EngineError as error:
            reasons.append(error.problem)
    return reasons


def show_engine(plan: EnginePlan, bundle: Path, console: Console) -> None:
    """Print the engine of a bundle and its deferred steps."""
    runtime = plan.settings.runtime
    if plan.file is not None:
        console.print(engine_table(engine_file(bundle, runtime).read_record()))
    for deferred in plan.deferred:
        console.print(f"[yellow]Deferred:[/] {escape(deferred)}", soft_wrap=True)
    name = escape(str(bundle))
    if plan.file is None:
        console.print(
            f"On a machine with the GPU: {escape(install_command(EXTRAS[runtime]))}, then "
            f"aftexport build {name}. Otherwise aftserve builds the engine when it starts.",
            soft_wrap=True,
        )
    elif plan.deferred:
        console.print(
            f"On a machine with the GPU: aftexport build {name} compares the engine. "
            "Otherwise aftserve compares it when it starts.",
            soft_wrap=True,
        )
