"""The TensorRT engine of a bundle: built for this machine or during the export, or deferred."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

import aftplugins
from aftexport.bundle.bundle import Bundle, engine_file
from aftexport.bundle.golden import Case
from aftexport.bundle.manifest import EnginePlan, Manifest
from aftexport.engines.cuda import Device, device
from aftexport.engines.tensorrt import builder
from aftexport.engines.tensorrt.engine import TensorrtEngine
from aftexport.engines.tensorrt.engine_file import (
    EngineFile,
    EngineRecord,
    EngineRequirements,
    engine_cache,
)
from aftexport.engines.tensorrt.runtimes import EXTRAS, TITLES, load
from aftexport.engines.tensorrt.settings import BuildSettings, build_settings
from aftexport.errors import EngineError, ParityError, UsageError
from aftexport.options import EngineOptions, ExportOptions
from aftexport.parity import Comparison, worst
from aftexport.parity.run_cases import verify_engine
from aftexport.system.console import escape, plain_table
from aftexport.system.files import sha256
from aftexport.system.installation import install_command
from aftexport.system.onnx_files import model_digest


def wanted_here(bundle: Bundle, settings: BuildSettings) -> EngineRequirements:
    """Return what this machine requires of an engine; raise EngineError without runtime or GPU."""
    trt = load(settings.runtime)
    library = plugin_library(settings)
    return EngineRequirements(
        version=trt.version,
        device=gpu_for(settings),
        settings=settings,
        precision=bundle.manifest.precision,
        model=model_digest(bundle.model_path),
        plugins=None if library is None else sha256(library),
    )


def plugin_library(settings: BuildSettings) -> Path | None:
    """Return the plugin library if it is built and has kernels for the engine's GPUs."""
    # The kernels need instructions of compute capability 80.
    return None if 75 in settings.compute_capabilities else aftplugins.library("tensorrt")


def gpu_for(settings: BuildSettings) -> Device | None:
    """Return the GPU of this machine; None if there is no GPU and the build does not need one."""
    try:
        return device()
    except EngineError:
        if settings.runtime == "tensorrt":
            raise
        return None


def make(
    bundle: Bundle,
    wanted: EngineRequirements,
    *,
    timing_cache: Path | None,
    parity: bool = True,
    console: Console,
) -> tuple[bytes, EngineRecord, list[Comparison]]:
    """Build an engine, and compare it with PyTorch if it runs on the GPU of this machine."""
    settings = wanted.settings
    trt = load(settings.runtime)
    with _bars(console, f"Building for {trt.title}") as advance:
        built = builder.build(
            trt,
            bundle.model_path,
            settings,
            precision=wanted.precision,
            plugins=plugin_library(settings),
            timing_cache=timing_cache,
            progress=advance,
        )
    record = EngineRecord.of(built, wanted)
    if wanted.device is None or record.misfit(wanted):
        return built.engine, record, []
    engine = TensorrtEngine(built.engine, settings.runtime, uses_plugins=record.uses_plugins)
    builder.check_types(engine.title, engine.types, wanted.precision)
    if not parity:
        return built.engine, record, []
    results = compare(bundle, engine)
    return built.engine, record.model_copy(update={"parity": "checked"}), results


def compare(
    bundle: Bundle, engine: TensorrtEngine, cases: Sequence[Case] | None = None
) -> list[Comparison]:
    """Compare an engine on this GPU with PyTorch's outputs."""
    results = verify_engine(
        bundle, engine, cases=cases, min_tokens=engine.min_tokens, max_tokens=engine.max_tokens
    )
    return [replace(result, engine=engine.title) for result in results]


def check_parity(results: Sequence[Comparison]) -> None:
    """Check the comparisons of an engine."""
    if not all(result.passed for result in results):
        furthest = worst(results)
        raise ParityError(
            f"Expected an engine error of at most {furthest.bound:.0e}, got "
            f"{furthest.largest_error:.1e} in case {furthest.case!r}.",
            "Export with --precision fp32, or serve with --engine onnxruntime.",
        )


def find(bundle: Bundle, wanted: EngineRequirements) -> EngineFile:
    """Return a usable engine of the cache or the bundle; raise EngineError with each reason."""
    cache = engine_cache(wanted.model)
    own = [cache.entry(wanted), engine_file(bundle.path, wanted.settings.runtime)]
    reasons = []
    for candidate in (*own, *cache.others(wanted)):
        if not candidate.record.exists():
            continue
        try:
            candidate.read(wanted)
        except EngineError as error:
            reasons.append(error.problem)
        else:
            return candidate
    problem = " ".join(reasons) or "No engine was built for this machine yet."
    raise EngineError(problem, "Run: aftexport build BUNDLE")


def build(
    bundle: Bundle, *, rebuild: bool = False, timing_cache: Path | None = None, console: Console
) -> EngineFile:
    """Build the engine of a bundle for this machine, unless a usable engine exists.

    Raises:
        UsageError: if the bundle was exported only to ONNX.
        EngineError: if the runtime or the GPU is missing, or the build fails.
        ParityError: if the engine is outside tolerance; the engine is discarded.
    """
    plan = bundle.manifest.engine
    if plan is None:
        raise UsageError(
            f"Expected a bundle with an engine, got {bundle.path} for ONNX only.",
            "Export with --to trt or --to trt-rtx.",
        )
    if timing_cache is not None and plan.settings.runtime == "tensorrt_rtx":
        raise UsageError(
            "--timing-cache needs a bundle of --to trt, got one of --to trt-rtx, which does not "
            "time kernels.",
            "Leave --timing-cache out.",
        )
    wanted = wanted_here(bundle, plan.settings)
    gpu, own = wanted.device, plan.settings.compute_capabilities
    if gpu is not None and own and gpu.capability not in own:
        raise EngineError(
            f"The engine is for compute capability {', '.join(map(str, own))}, got {gpu}.",
            "Export with another --compute-capability, or with --to trt.",
        )
    cache = engine_cache(wanted.model)
    if not rebuild:
        try:
            return _compared(bundle, wanted, find(bundle, wanted))
        except EngineError as error:
            console.print(f"[yellow]{escape(error.problem)}[/]", soft_wrap=True)
    waited = False

    def wait() -> None:
        nonlocal waited
        waited = True
        console.print("Another process is building this engine; waiting for it.")

    with cache.locked(wanted, wait):
        if waited or not rebuild:
            with suppress(EngineError):  # another process may have built it meanwhile
                return find(bundle, wanted)
        engine, record, results = make(bundle, wanted, timing_cache=timing_cache, console=console)
        check_parity(results)
        return cache.put(wanted, engine, record)


def _compared(bundle: Bundle, wanted: EngineRequirements, file: EngineFile) -> EngineFile:
    """Compare an engine with PyTorch if the comparison was deferred to this machine."""
    content, record = file.read(wanted)
    if record.parity == "checked" or wanted.device is None:
        return file
    engine = TensorrtEngine(content, record.runtime, uses_plugins=record.uses_plugins)
    check_parity(compare(bundle, engine))
    checked = record.model_copy(update={"parity": "checked"})
    return engine_cache(wanted.model).put(wanted, content, checked)


@contextmanager
def _bars(console: Console, title: str) -> Iterator[builder.Progress]:
    """Show a progress bar for each phase of the builder."""
    start = time.perf_counter()
    with Progress(console=console, transient=True) as progress:
        progress.add_task(title, total=None)
        bars: dict[str, TaskID] = {}

        def advance(phase: str, done: int, total: int) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(f"  {phase}", total=total)
            progress.update(bars[phase], completed=done)

        yield advance
    console.print(f"[green]done[/] {title} [dim]{time.perf_counter() - start:.1f} s[/]")


_WAYS = {"plugin": "plugin", "portable": "fallback"}


def engine_table(record: EngineRecord) -> Table:
    """Return a table with the record of a TensorRT engine."""
    settings = record.settings
    capabilities = ", ".join(f"{c // 10}.{c % 10}" for c in settings.compute_capabilities)
    lengths = ", ".join(map(str, settings.opt_lengths))
    table = plain_table("", "")
    rows = {
        "built by": f"{TITLES[record.runtime]} {record.version}",
        "for": record.gpu or f"compute capability {capabilities}",
        "documents": f"{settings.min_length} to {settings.max_length} tokens, best at {lengths}; "
        f"up to {settings.max_batch} at once",
        "types": ", ".join(f"{name} {kind}" for name, kind in record.types.items()),
        "operators": ", ".join(f"{op} by its {_WAYS[way]}" for op, way in record.operators.items()),
        "parity": record.parity,
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


_BFLOAT16 = (
    "The rounding of activations to bfloat16: ONNX Runtime has no bfloat16 products on the CPU, "
    "so it runs the graph with float32 activations."
)


def check_options(options: ExportOptions) -> None:
    """Check the options of an engine before the model is read."""
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
    """Build the engine of an unfinished bundle, or list the steps left to other machines."""
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
