"""Engines and builds that share the plugin library, in the real registry of TensorRT-RTX."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import aftplugins
from aftexport.engines.tensorrt.runtimes import (
    TensorRt,
    deserialize,
    hold_plugins,
    load,
    plugins_loaded,
    release_plugins,
)
from aftexport.errors import EngineError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed"
)


@pytest.fixture
def rtx() -> TensorRt:
    return load("tensorrt_rtx")


@pytest.fixture
def installed(library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the library that ``aftplugins`` finds."""
    monkeypatch.setattr(aftplugins, "__path__", [str(library.parent)])
    monkeypatch.delenv(aftplugins.DISABLE_VARIABLE, raising=False)
    return library


def has_plugin(trt: TensorRt) -> bool:
    """Return whether the registry has our plugins."""
    creators = trt.module.get_plugin_registry().all_creators
    return any(creator.plugin_namespace == "ai.aftexport" for creator in creators)


class GpuRuntime:
    """Loads an engine as TensorRT does, which needs a GPU: by the creators of the registry.

    The first byte of an engine says whether it is intact, the second whether it uses a plugin.
    """

    engine_host_code_allowed = False

    def __init__(self, trt: TensorRt) -> None:
        self.trt = trt

    def deserialize_cuda_engine(self, serialized: bytes) -> bytes | None:
        assert self.engine_host_code_allowed
        if serialized[:1] == b"X":
            self.trt.logger.errors.append("the magic tag does not match")
            return None
        if serialized[1:] == b"P" and not has_plugin(self.trt):
            self.trt.logger.errors.append("cannot find plugin AftSimple")
            return None
        return serialized


@pytest.fixture
def gpu(rtx: TensorRt, installed: Path) -> Iterator[TensorRt]:
    """Return TensorRT-RTX with a runtime that needs no GPU, and its real registry."""
    module: Any = SimpleNamespace(
        __version__=rtx.version,
        get_plugin_registry=rtx.module.get_plugin_registry,
        Runtime=lambda _: GpuRuntime(rtx),
    )
    yield replace(rtx, module=module)
    if has_plugin(rtx):
        release_plugins(rtx, installed)


def test_engine_without_its_plugins_loads(gpu: TensorRt) -> None:
    _, engine = deserialize(gpu, b"EP", uses_plugins=True)
    assert engine == b"EP"
    assert has_plugin(gpu)


def test_engine_without_plugins_registers_none(gpu: TensorRt) -> None:
    deserialize(gpu, b"E", uses_plugins=True)
    assert not has_plugin(gpu)
    with pytest.raises(EngineError, match="refuses the engine: cannot find plugin AftSimple"):
        deserialize(gpu, b"EP", uses_plugins=False)
    assert not has_plugin(gpu)


def test_damaged_engine_error_has_both_reasons(gpu: TensorRt, installed: Path) -> None:
    reasons = f"magic tag does not match. With the plugins of {installed}, .*magic tag"
    with pytest.raises(EngineError, match=reasons):
        deserialize(gpu, b"XP", uses_plugins=True)


def test_missing_library_is_named(gpu: TensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(aftplugins.DISABLE_VARIABLE, "1")
    reasons = r"cannot find plugin AftSimple.*switched off by AFTEXPORT_PORTABLE"
    with pytest.raises(EngineError, match=reasons):
        deserialize(gpu, b"EP", uses_plugins=True)


def test_library_that_is_not_installed_is_named(
    gpu: TensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is refused, so no operator runs by a portable body."""
    monkeypatch.setattr(aftplugins, "library", lambda _: None)
    with pytest.raises(EngineError, match=r"libaftplugins_tensorrt\.so is not inst") as refusal:
        deserialize(gpu, b"EP", uses_plugins=True)
    assert "portable" not in refusal.value.problem
    assert "make cuda-wheel" in refusal.value.remedy


def test_build_leaves_library_of_engine(rtx: TensorRt, gpu: TensorRt, installed: Path) -> None:
    """A registry that a build has left still has the plugins of a loaded engine."""
    deserialize(gpu, b"EP", uses_plugins=True)
    with plugins_loaded(rtx, installed):
        assert has_plugin(rtx)
    assert has_plugin(rtx)


def test_last_holder_removes_library(rtx: TensorRt, installed: Path) -> None:
    for _ in range(2):
        hold_plugins(rtx, installed)
    release_plugins(rtx, installed)
    assert has_plugin(rtx)
    release_plugins(rtx, installed)
    assert not has_plugin(rtx)
