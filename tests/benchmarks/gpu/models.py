"""Exported models of every mechanism on the GPU: in ONNX Runtime and in TensorRT, by aftexport."""

import io
import os
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.gpu.report import Outcome

if TYPE_CHECKING:
    from aftexport.bundle.bundle import Bundle

TOKENS = 4096
ROUNDS = 21
CONFIG = {"vocab_size": 1000, "num_labels": 4, "dim": 512, "depth": 2, "num_heads": 8,
          "ffn_dim": 1024, "max_length": TOKENS}  # fmt: skip


def run(
    libraries: Path,
    mechanisms: Sequence[str],
    is_due: Callable[[str], bool] = lambda what: True,
    left_out: Collection[str] = (),
) -> Iterator[Outcome]:
    """Exports, verifies and times every mechanism, as far as the runtimes are installed.

    The libraries of ``libraries``, a build of plugins/cuda, are used in place of installed ones.
    ``left_out`` names runtimes that are not asked for, ``onnxruntime`` or ``tensorrt``.
    """
    if (lack := _lacks_module("aftexport.pipeline.export")) is not None:
        yield Outcome.skip("exported models", lack, "--no-models")
        return
    _use_libraries(libraries)
    ways: list[tuple[str, str, Callable[[], str | None], Callable[[str, Path], str]]] = [
        ("ONNX Runtime, CUDA provider, float32", "onnxruntime", _lacks_onnxruntime,
         partial(in_onnxruntime, precision="fp32", provider="cuda")),
        ("ONNX Runtime, CUDA provider, float16", "onnxruntime", _lacks_onnxruntime,
         partial(in_onnxruntime, precision="fp16", provider="cuda")),
        ("TensorRT, float16", "tensorrt", lacks_tensorrt, in_tensorrt),
    ]  # fmt: skip
    for title, runtime, lacks, way in ways:
        if runtime in left_out:
            continue
        if (lack := lacks()) is not None:
            yield Outcome.skip(title, lack, f"--no-{runtime}")
            continue
        for mechanism in mechanisms:
            if is_due(what := f"{mechanism} in {title}"):
                yield outcome(what, partial(way, mechanism))


def run_bundles(
    libraries: Path, folder: Path, is_due: Callable[[str], bool] = lambda what: True
) -> Iterator[Outcome]:
    """Verifies the bundles of a folder, for which aftexport needs no torch; see ``run``."""
    title = "ONNX Runtime, CUDA provider"
    lack = _lacks_module("aftexport.parity.run_cases") or _lacks_onnxruntime()
    if lack is not None:
        yield Outcome.skip(title, lack, "--no-onnxruntime")
        return
    from aftexport.bundle.bundle import Bundle

    _use_libraries(libraries)
    paths = sorted(folder.glob("*.bundle"))
    if not paths:
        yield Outcome(title, f"{folder} has no folder *.bundle", passed=False)
    for path in paths:
        if is_due(what := f"{path.name} in {title}"):
            yield outcome(what, lambda _, path=path: verified(Bundle.open(path), "cuda"))


def _lacks_module(name: str) -> str | None:
    try:
        import_module(name)
        import_module("aftplugins")
    except ImportError as error:
        return f"{error.name} is not installed"
    return None


def _use_libraries(libraries: Path) -> None:
    import aftplugins

    aftplugins.__path__ = [str(libraries), str(libraries / "tensorrt"), *aftplugins.__path__]
    os.environ["AFTEXPORT_CACHE"] = str(libraries / "engines")


def outcome(what: str, way: Callable[[Path], str]) -> Outcome:
    """What ``way`` says, in a folder of its own, or what it raises."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return Outcome(what, way(Path(folder)))
        except Exception as error:  # of whatever runtime
            return Outcome(what, str(error), passed=False, printed=traceback.format_exc())


def in_onnxruntime(
    mechanism: str, folder: Path, *, precision: str, provider: Literal["cpu", "cuda"]
) -> str:
    """Exports a model and verifies it; see ``verified``."""
    return verified(_exported(mechanism, folder, to="onnx", precision=precision), provider)


def verified(bundle: "Bundle", provider: Literal["cpu", "cuda"]) -> str:
    """Verifies a bundle as ``aftexport verify`` does.

    Raises:
        AftexportError: where it cannot be run.
        ArithmeticError: where it is outside tolerance, or a mechanism runs by its portable body.
    """
    from aftexport.engines.onnxruntime import operator_paths
    from aftexport.parity import worst
    from aftexport.parity.run_cases import verify

    paths = _expect_no_body(
        operator_paths(bundle.model_path, provider=provider), "LayerNormFastformer"
    )
    results = verify(bundle, provider=provider)
    furthest = worst(results)
    said = f"{paths}; {len(results)} cases, error {furthest.error:.1e}, bound {furthest.bound:.0e}"
    if not all(result.passed for result in results):
        raise ArithmeticError(f"{furthest.subject}, {furthest.case}: {said}")
    return said


def in_tensorrt(mechanism: str, folder: Path) -> str:
    """Builds and verifies the engine with the plugins and the one without, and times both.

    Raises:
        AftexportError: where one cannot be built or is outside tolerance.
        ArithmeticError: where a mechanism runs by its portable body.
    """
    import numpy as np

    from aftexport.bundle.bundle import engine_file
    from aftexport.deploy.build_engine import check_parity, compare
    from aftexport.engines.tensorrt import builder
    from aftexport.engines.tensorrt.engine import TensorrtEngine
    from aftexport.engines.tensorrt.runtimes import load
    from benchmarks.limits import interleave

    bundle = _exported(mechanism, folder, to="trt", precision="fp16")
    file = engine_file(bundle.path, "tensorrt")
    paths = _expect_no_body(file.read_record().operators)
    plan = bundle.manifest.engine
    assert plan is not None
    portable = builder.build(
        load("tensorrt"), bundle.model_path, plan.settings, precision="fp16", plugins=None
    )
    engines = {
        "plugins": TensorrtEngine(file.engine.read_bytes(), "tensorrt", uses_plugins=True),
        "portable": TensorrtEngine(portable.engine, "tensorrt"),
    }
    results = {name: compare(bundle, engine) for name, engine in engines.items()}
    for compared in results.values():
        check_parity(compared)
    ids = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (1, TOKENS))
    inputs = {"input_ids": ids, "lengths": np.array([TOKENS])}
    seconds = interleave(
        {name: partial(engine.run, inputs) for name, engine in engines.items()}, ROUNDS
    )
    return f"{paths}; {TOKENS:,} tokens; " + "; ".join(
        f"{name} {seconds[name] * 1e3:.3f} ms, error {max(r.error for r in results[name]):.1e}"
        for name in engines
    )


def lacks_tensorrt() -> str | None:
    """What is missing for engines."""
    from aftexport.engines.cuda import device
    from aftexport.engines.tensorrt.runtimes import load
    from aftexport.errors import EngineError

    try:
        load("tensorrt")
        device()
    except EngineError as error:
        return error.problem
    return None


def _lacks_onnxruntime() -> str | None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return None
    return "this ONNX Runtime has no CUDA provider; onnxruntime-gpu has"


def _exported(mechanism: str, folder: Path, *, to: str, precision: str) -> "Bundle":
    import torch
    from rich.console import Console

    import aftexport
    from aftexport.nn import ClassifierConfig, DocumentClassifier
    from aftexport.pipeline.export import export

    torch.manual_seed(0)
    config = ClassifierConfig(mechanism=mechanism, **CONFIG)
    aftexport.save(folder / "model.pt", model=DocumentClassifier(config), labels=tuple("abcd"))
    return export(
        folder / "model.pt", to=to, precision=precision, max_length=TOKENS, check_parity=False,
        console=Console(file=io.StringIO()),
    )  # fmt: skip


def _expect_no_body(paths: Mapping[str, str], *others: str) -> str:
    """Which way each operator runs; mechanisms, and ``others`` that have kernels, by those."""
    from aftexport.operators.torch_ops import OPERATORS

    said = ", ".join(f"{name} {path}" for name, path in paths.items())
    fused = (*OPERATORS, *others)
    if any(path == "portable" for name, path in paths.items() if name in fused):
        raise ArithmeticError(f"a kernel was not used: {said}")
    return said
