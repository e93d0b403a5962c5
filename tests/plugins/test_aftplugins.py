from pathlib import Path

import pytest

import aftplugins

LIBRARY = "libaftplugins_onnxruntime"
REMEDIES = {"onnxruntime": "compiler", "onnxruntime_cuda": "make cuda", "tensorrt": "make cuda"}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The package as an editable install has it: sources apart from what was built."""
    paths = [tmp_path / "sources", tmp_path / "built"]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr(aftplugins, "__path__", [str(path) for path in paths])
    monkeypatch.delenv(aftplugins.DISABLE_VARIABLE, raising=False)
    return paths


@pytest.mark.parametrize("runtime", aftplugins.RUNTIMES)
def test_without_a_library_the_remedy_is_said(runtime: str, folders: list[Path]) -> None:
    assert aftplugins.library(runtime) is None
    reason = aftplugins.missing(runtime)
    assert reason is not None
    assert REMEDIES[runtime] in reason


def test_on_another_system_no_compiler_is_asked_for(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert aftplugins.missing("onnxruntime") == (
        "The fused kernels need Linux, so every operator runs by its portable body."
    )


@pytest.mark.parametrize("place", [0, 1])
def test_a_library_is_found_wherever_the_package_reaches(place: int, folders: list[Path]) -> None:
    built = folders[place] / f"{LIBRARY}.so"
    built.write_bytes(b"")
    assert aftplugins.library("onnxruntime") == built
    assert aftplugins.missing("onnxruntime") is None


def test_a_runtime_is_given_its_own_library(folders: list[Path]) -> None:
    for runtime in aftplugins.RUNTIMES:
        (folders[0] / f"libaftplugins_{runtime}.so").write_bytes(b"")
    found = [aftplugins.library(runtime) for runtime in aftplugins.RUNTIMES]
    assert len(set(found)) == len(aftplugins.RUNTIMES)


def test_a_folder_of_that_name_is_no_library(folders: list[Path]) -> None:
    (folders[0] / f"{LIBRARY}.so").mkdir()
    assert aftplugins.library("onnxruntime") is None


def test_the_switch_turns_the_library_off_and_says_so(
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
