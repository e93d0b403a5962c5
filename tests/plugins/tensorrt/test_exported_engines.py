"""``aftexport --to trt-rtx`` where the plugins are built: every operator runs by its plugin."""

from pathlib import Path

import engines
import onnx
import pytest
import tiny_models
import torch
from sampling import any_case

import aftexport
import aftplugins
from aftexport.bundle.bundle import engine_file
from aftexport.capture.capture import capture
from aftexport.engines import aft_full_product
from aftexport.engines.aft_full_product import use_products
from aftexport.engines.tensorrt import builder
from aftexport.engines.tensorrt.builder import build
from aftexport.engines.tensorrt.runtimes import hold_plugins, load, release_plugins
from aftexport.engines.tensorrt.settings import build_settings
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.operators.domain import operators_in
from aftexport.operators.torch_ops import OPERATORS
from aftexport.options import EngineOptions
from aftexport.pipeline.export import export
from aftexport.system.files import sha256


@pytest.fixture
def installed(library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the library that ``aftplugins`` finds."""
    monkeypatch.setattr(aftplugins, "__path__", [str(library.parent), *aftplugins.__path__])
    monkeypatch.delenv(aftplugins.DISABLE_VARIABLE, raising=False)
    return library


@pytest.mark.table(keep=0.2, by=any_case)
@pytest.mark.parametrize("mechanism", sorted({o.stem for o in OPERATORS.values()}))
def test_mechanism_engine_contains_plugin(mechanism: str, installed: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ClassifierConfig(**tiny_models.CONFIG | {"mechanism": mechanism, "max_length": 100})
    aftexport.save(
        tmp_path / "model.pt", model=DocumentClassifier(config), labels=tiny_models.LABELS
    )
    bundle = export(tmp_path / "model.pt", to="trt-rtx", precision="fp16", check_parity=False)
    record = engine_file(bundle.path, "tensorrt_rtx").read_record()
    assert record.operators == dict.fromkeys(bundle.manifest.operators, "plugin")
    assert record.plugins == sha256(installed)
    # The library is inside.
    assert bundle.files["model.trt-rtx.engine"] > installed.stat().st_size


@pytest.mark.parametrize(("first_tokens", "replaced"), [(16, True), (65, False)])
def test_longest_document_decides_about_product(
    first_tokens: int,
    replaced: bool,
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The path of the operator is a plugin's either way."""
    changes: list[bool] = []
    monkeypatch.setattr(aft_full_product, "MIN_TOKENS", first_tokens)
    monkeypatch.setattr(
        builder,
        "use_products",
        lambda *given, **named: changes.append(use_products(*given, **named)) or changes[-1],
    )
    settings = build_settings("trt-rtx", EngineOptions(), precision="fp16", max_tokens=64)
    path = engines.graph(tmp_path, mechanism="aft_full", max_length=100)
    built = build(load("tensorrt_rtx"), path, settings, precision="fp16", plugins=installed)
    assert changes == [replaced]
    assert built.operators == {"AftFull": "plugin"}


def test_every_setting_runs_by_plugin(installed: Path, tmp_path: Path) -> None:
    model, runtime = tmp_path / "model.onnx", load("tensorrt_rtx")
    program = capture(tiny_models.MixedSettings(), dtype=torch.float16, max_tokens=300)
    onnx.save(finish(lower(program), precision="fp16", fuse=False), model)
    operators = operators_in(onnx.load(model))
    assert {"AftSimple", "AftSimple_none"} <= operators.keys()
    for plugins, way in ((installed, "plugin"), (None, "portable")):
        built = build(runtime, model, engines.SETTINGS, precision="fp16", plugins=plugins)
        assert built.operators == dict.fromkeys(operators, way)


def test_build_without_plugins_contains_none(installed: Path, tmp_path: Path) -> None:
    """A build with the plugins came before in the same process."""
    model, runtime = engines.graph(tmp_path), load("tensorrt_rtx")
    ways = [
        build(runtime, model, engines.SETTINGS, precision="fp16", plugins=plugins).operators
        for plugins in (installed, None)
    ]
    assert ways == [{"AftSimple": "plugin"}, {"AftSimple": "portable"}]


def test_portable_build_ignores_plugins_of_engines(installed: Path, tmp_path: Path) -> None:
    """An engine of the process holds the plugins."""
    model, runtime = engines.graph(tmp_path), load("tensorrt_rtx")
    hold_plugins(runtime, installed)
    try:
        built = build(runtime, model, engines.SETTINGS, precision="fp16", plugins=None)
    finally:
        release_plugins(runtime, installed)
    assert built.operators == {"AftSimple": "portable"}


def test_unsupported_gpus_omit_plugins(installed: Path, tmp_path: Path) -> None:
    """The plugins have no kernels for these GPUs."""
    from aftexport.deploy.build_engine import plugin_library

    old = EngineOptions(compute_capabilities=(75, 86))
    for options, library in ((EngineOptions(), installed), (old, None)):
        settings = build_settings("trt-rtx", options, precision="fp16", max_tokens=100)
        found = plugin_library(settings)
        assert (found is None) == (library is None)
