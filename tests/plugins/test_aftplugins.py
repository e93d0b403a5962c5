from pathlib import Path

import pytest

import aftplugins

LIBRARY = "libaftplugins_onnxruntime"
WHEEL = "the file that it builds, dist/aftexport_cuda-*.whl"
"""The name of the wheel is not registered at an index, so pip must install the file."""
REMEDIES = {"onnxruntime": "compiler", "onnxruntime_cuda": WHEEL, "tensorrt": WHEEL}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Arrange the package as in an editable install: sources and builds in separate folders."""
    paths = [tmp_path / "sources", tmp_path / "built"]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr(aftplugins, "__path__", [str(path) for path in paths])
    monkeypatch.delenv(aftplugins.DISABLE_VARIABLE, raising=False)
    return paths


@pytest.mark.parametrize("runtime", aftplugins.RUNTIMES)
def test_missing_library_error_has_remedy(runtime: str, folders: list[Path]) -> None:
    assert aftplugins.library(runtime) is None
    reason = aftplugins.missing(runtime)
    assert reason is not None
    assert REMEDIES[runtime] in reason


def test_other_system_needs_no_compiler(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert aftplugins.missing("onnxruntime") == (
        "The fused kernels need Linux, so every operator runs by its fallback."
    )


@pytest.mark.parametrize("place", [0, 1])
def test_library_is_found_in_any_layout(place: int, folders: list[Path]) -> None:
    built = folders[place] / f"{LIBRARY}.so"
    built.write_bytes(b"")
    assert aftplugins.library("onnxruntime") == built
    assert aftplugins.missing("onnxruntime") is None


def test_runtime_loads_own_library(folders: list[Path]) -> None:
    for runtime in aftplugins.RUNTIMES:
        (folders[0] / f"libaftplugins_{runtime}.so").write_bytes(b"")
    found = [aftplugins.library(runtime) for runtime in aftplugins.RUNTIMES]
    assert len(set(found)) == len(aftplugins.RUNTIMES)


def test_folder_is_not_a_library(folders: list[Path]) -> None:
    (folders[0] / f"{LIBRARY}.so").mkdir()
    assert aftplugins.library("onnxruntime") is None


def test_variable_disables_library_and_reports(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders[0] / f"{LIBRARY}.so").write_bytes(b"")
    monkeypatch.setenv(aftplugins.DISABLE_VARIABLE, "1")
    assert aftplugins.library("onnxruntime") is None
    reason = aftplugins.missing("onnxruntime")
    assert reason is not None
    assert aftplugins.DISABLE_VARIABLE in reason
    monkeypatch.setenv(aftplugins.DISABLE_VARIABLE, "0")
    assert aftplugins.library("onnxruntime") is not None


@pytest.mark.parametrize("runtime", ["", "torch", "cuda", "../onnxruntime"])
def test_an_unknown_runtime_is_refused(runtime: str) -> None:
    with pytest.raises(ValueError, match="onnxruntime"):
        aftplugins.library(runtime)
