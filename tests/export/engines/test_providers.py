"""The checks of an execution provider before a session: each names what is missing."""

import ctypes
import platform
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest

import aftplugins
from aftexport.engines import cuda
from aftexport.engines.onnxruntime import PROVIDERS, OnnxRuntimeEngine, providers
from aftexport.engines.onnxruntime.package import native
from aftexport.errors import EngineError

CUDA = PROVIDERS["cuda"]


@pytest.fixture
def has_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ONNX Runtime name the provider, as the package for GPUs does."""
    names = [CUDA.name, "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)


def test_session_asks_provider_before_cpu() -> None:
    (name, options), (rest, _) = CUDA.entries
    assert (name, rest) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert options["use_tf32"] == "0"
    assert [entry for entry, _ in PROVIDERS["cpu"].entries] == ["CPUExecutionProvider"]


def test_missing_driver_is_named(has_provider: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_DRIVER", "libabsent-driver.so.1")
    with pytest.raises(
        EngineError, match=r"Expected a GPU.*libabsent-driver\.so\.1 is missing"
    ) as refusal:
        CUDA.check()
    assert "nvidia-smi" in refusal.value.remedy


@pytest.mark.skipif(platform.system() != "Linux", reason="the C library has another name")
@pytest.mark.parametrize(
    ("status", "count", "problem"),
    [
        (100, 0, "no device is visible"),
        (999, 0, "error 999, unknown error"),
        (7, 0, "reports error 7"),
        (0, 0, "finds no device"),
        (0, 1, None),
    ],
)
def test_driver_tells_number_of_devices(
    status: int, count: int, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def __init__(self, _: str) -> None: ...

        def cuInit(self, _: int) -> int:  # noqa: N802  # the driver's name
            return status

        def cuGetErrorString(self, code: int, text: object) -> int:  # noqa: N802
            if code == 7:  # the driver does not know it
                return 1
            text._obj.value = b"unknown error"  # type: ignore[attr-defined]  # of a reference
            return 0

        def cuDeviceGetCount(self, found: object) -> int:  # noqa: N802
            found._obj.value = count  # type: ignore[attr-defined]  # of a reference
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    found = cuda.missing_gpu()
    assert found is None if problem is None else problem in str(found)


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for operators that have kernels on a GPU, and unless they are switched off."""
    monkeypatch.setattr(aftplugins, "library", lambda runtime: None)
    with pytest.raises(
        EngineError, match=r"kernels for AftLocal and AftSimple, got none: lib"
    ) as refusal:
        CUDA.check_kernels(["AftSimple", "AftLocal_sigmoid", "LayerNormFeedForward"])
    assert "make cuda-wheel" in refusal.value.remedy
    CUDA.check_kernels(["LayerNormFeedForward", "RecurrentLinearAttention"])
    PROVIDERS["cpu"].check_kernels(["AftSimple"])
    monkeypatch.setenv(aftplugins.DISABLE_VARIABLE, "1")
    CUDA.check_kernels(["AftSimple"])


@pytest.mark.skipif(
    CUDA.name in onnxruntime.get_available_providers(), reason="the provider is here"
)
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_provider_that_cannot_start_is_named(
    bundle_folder: Path, has_provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime itself only warns, and runs the model on the CPU."""
    monkeypatch.setattr(providers, "missing_gpu", lambda: None)
    with pytest.raises(EngineError, match=f"{CUDA.name}.*Install the NVIDIA driver, CUDA"):
        OnnxRuntimeEngine(bundle_folder / "model.onnx", provider="cuda")


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        (native.InvalidGraph, "Export it again"),
        (native.NotImplemented, "Export it again"),
        (native.InvalidProtobuf, "Export it again"),
        (native.Fail, "Install the NVIDIA driver"),
    ],
)
def test_remedy_follows_cause_of_failed_load(
    failure: type[Exception],
    remedy: str,
    bundle_folder: Path,
    has_provider: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise failure("no Op registered for Gelu")

    monkeypatch.setattr(providers, "missing_gpu", lambda: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(EngineError, match="on CUDAExecutionProvider: no Op") as refusal:
        OnnxRuntimeEngine(bundle_folder / "model.onnx", provider="cuda", fused=False)
    assert refusal.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("Failed to allocate memory for requested buffer of size 1024", "Send shorter documents"),
        ("CUDA failure 2: out of memory", "Send shorter documents"),
        ("Invalid rank for input", "Check the shapes"),
    ],
)
def test_remedy_follows_cause_of_failed_run(
    message: str, remedy: str, bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise native.RuntimeException(message)

    engine = OnnxRuntimeEngine(bundle_folder / "model.onnx", threads=1)
    monkeypatch.setattr(engine, "_session", SimpleNamespace(run=fail))
    with pytest.raises(EngineError, match=message) as failed:
        engine.run({})
    assert failed.value.remedy.startswith(remedy)
