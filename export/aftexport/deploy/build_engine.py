"""From a bundle to an engine that runs on this machine."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

import aftplugins
from aftexport.bundle.bundle import Bundle, engine_file
from aftexport.bundle.golden import Case
from aftexport.console import escape
from aftexport.engines.cuda import Device, device
from aftexport.engines.tensorrt import builder
from aftexport.engines.tensorrt.cache import engine_cache
from aftexport.engines.tensorrt.engine import TensorrtEngine
from aftexport.engines.tensorrt.engine_file import EngineFile, EngineRecord, Wanted
from aftexport.engines.tensorrt.runtimes import load
from aftexport.engines.tensorrt.settings import BuildSettings
from aftexport.errors import EngineError, ParityError, UsageError
from aftexport.parity import Comparison, worst
from aftexport.parity.run_cases import verify_engine
from aftexport.system.files import sha256


def wanted_here(bundle: Bundle, settings: BuildSettings) -> Wanted:
    """What an engine of ``bundle`` must be on this machine.

    Raises:
        EngineError: where the runtime is absent or, for TensorRT, there is no GPU.
    """
    trt = load(settings.runtime)
    library = plugin_library(settings)
    return Wanted(
        version=trt.version,
        device=gpu_for(settings),
        settings=settings,
        precision=bundle.manifest.precision,
        model=sha256(bundle.model_path),
        plugins=None if library is None else sha256(library),
    )


def plugin_library(settings: BuildSettings) -> Path | None:
    """The plugin library, where it is built and has kernels for the engine's GPUs."""
    # Its kernels take instructions that came with compute capability 80.
    return None if 75 in settings.compute_capabilities else aftplugins.library("tensorrt")


def gpu_for(settings: BuildSettings) -> Device | None:
    """The GPU of this machine; None where there is none and none is needed to build.

    Raises:
        EngineError: where TensorRT, which times its kernels on the GPU, lacks one.
    """
    try:
        return device()
    except EngineError:
        if settings.runtime == "tensorrt":
            raise
        return None


def make(
    bundle: Bundle,
    wanted: Wanted,
    *,
    timing_cache: Path | None,
    parity: bool = True,
    console: Console,
) -> tuple[bytes, EngineRecord, list[Comparison]]:
    """Builds an engine and, where there is a GPU it runs on, compares it with PyTorch.

    Returns:
        The engine, what it is, and the comparisons; none without such a GPU.

    Raises:
        UsageError, EngineError: where it cannot be built, or fails.
    """
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
    engine = TensorrtEngine(built.engine, settings.runtime)
    builder.check_types(engine.title, engine.types, wanted.precision)
    if not parity:
        return built.engine, record, []
    results = compare(bundle, engine)
    return built.engine, record.model_copy(update={"parity": "checked"}), results


def compare(
    bundle: Bundle, engine: TensorrtEngine, cases: Sequence[Case] | None = None
) -> list[Comparison]:
    """Compares an engine on this GPU with PyTorch's outputs.

    Args:
        bundle: what the engine was built from.
        engine: on this GPU.
        cases: what to compare on; the bundle's own by default.

    Raises:
        EngineError: where it fails.
    """
    results = verify_engine(
        bundle, engine, cases=cases, min_tokens=engine.min_tokens, max_tokens=engine.max_tokens
    )
    return [replace(result, engine=engine.title) for result in results]


def check_parity(results: Sequence[Comparison]) -> None:
    """Judges the comparisons of an engine.

    Raises:
        ParityError: where one is outside tolerance.
    """
    if not all(result.passed for result in results):
        furthest = worst(results)
        raise ParityError(
            f"Parity of the engine failed: case {furthest.case!r}: error {furthest.error:.1e}, "
            f"bound {furthest.bound:.0e}.",
            "Export with --precision fp32, or serve with --engine onnxruntime.",
        )


def find(bundle: Bundle, wanted: Wanted) -> EngineFile:
    """An engine that may be used here: of the cache, or else of the bundle.

    Raises:
        EngineError: where there is none, with the reason for each that was seen.
    """
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
    what = " ".join(reasons) or "No engine was built for this machine yet."
    raise EngineError(what, "Run: aftexport build BUNDLE")


def build(
    bundle: Bundle, *, rebuild: bool = False, timing_cache: Path | None = None, console: Console
) -> EngineFile:
    """Builds the engine of a bundle for this machine, unless one is there that fits.

    Args:
        bundle: exported ``--to trt`` or ``--to trt-rtx``.
        rebuild: build it all the same.
        timing_cache: file of kernel timings, read where it exists and written back.
        console: where progress goes.

    Returns:
        The engine, in the cache or in the bundle.

    Raises:
        UsageError: where the bundle is for ONNX alone.
        EngineError: where the runtime or the GPU is missing, or the build fails.
        ParityError: where the engine is outside tolerance; it is not kept.
    """
    plan = bundle.manifest.engine
    if plan is None:
        raise UsageError(
            f"{bundle.path} was exported to ONNX alone.", "Export with --to trt or --to trt-rtx."
        )
    wanted = wanted_here(bundle, plan.settings)
    gpu, own = wanted.device, plan.settings.compute_capabilities
    if gpu is not None and own and gpu.capability not in own:
        raise EngineError(
            f"The engine is for compute capability {', '.join(map(str, own))}, here is {gpu}.",
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
            with suppress(EngineError):  # of another process that was building it
                return find(bundle, wanted)
        engine, record, results = make(bundle, wanted, timing_cache=timing_cache, console=console)
        check_parity(results)
        return cache.put(wanted, engine, record)


def _compared(bundle: Bundle, wanted: Wanted, file: EngineFile) -> EngineFile:
    """Compares an engine with PyTorch where that was left for this machine."""
    content, record = file.read(wanted)
    if record.parity == "checked" or wanted.device is None:
        return file
    check_parity(compare(bundle, TensorrtEngine(content, record.runtime)))
    checked = record.model_copy(update={"parity": "checked"})
    return engine_cache(wanted.model).put(wanted, content, checked)


@contextmanager
def _bars(console: Console, title: str) -> Iterator[builder.Progress]:
    """A bar for each phase of the builder."""
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
