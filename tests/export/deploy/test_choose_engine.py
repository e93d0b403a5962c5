from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.deploy import choose_engine as module
from aftexport.deploy.choose_engine import ChosenEngine, choose_engine
from aftexport.errors import EngineError, UsageError
from aftexport.pipeline.export import export

CONSOLE = Console(quiet=True)
INPUTS = {"input_ids": np.array([[5, 6, 7]]), "lengths": np.array([3])}


@pytest.mark.parametrize("asked", ["auto", "onnxruntime"])
def test_onnx_bundle_is_served_by_onnxruntime(asked: str, bundle_folder: Path) -> None:
    choice = choose_engine(Bundle.open(bundle_folder), asked, console=CONSOLE)
    assert choice.engine.name == "onnxruntime"
    assert choice.max_tokens is None
    assert ("only to ONNX" if asked == "auto" else "--engine onnxruntime") in choice.reason


def test_tensorrt_bundle_is_served_by_tensorrt(bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="--to trt"):
        choose_engine(Bundle.open(bundle_folder), "tensorrt", console=CONSOLE)


def test_onnxruntime_replaces_tensorrt_without_gpu(no_gpu: None, rtx_bundle: Path) -> None:
    """The reason is reported."""
    bundle = Bundle.open(rtx_bundle)
    choice = choose_engine(bundle, console=CONSOLE)
    assert choice.engine.name == "onnxruntime"
    assert "Expected a GPU, got none" in choice.reason
    with pytest.raises(EngineError, match="Expected a GPU, got none"):
        choose_engine(bundle, "tensorrt", console=CONSOLE)


def test_bfloat16_on_cpu_reports_float32(
    no_gpu: None, checkpoint_file: Path, tmp_path: Path
) -> None:
    """A bfloat16 graph runs in float32 on the CPU."""
    bundle = export(checkpoint_file, to="trt", precision="bf16", out=tmp_path / "b")
    choice = choose_engine(bundle, console=CONSOLE)
    assert "float32" in choice.reason
    assert np.isfinite(choice.engine.run(INPUTS)["logits"]).all()


def test_provider_with_tensorrt_is_refused(rtx_bundle: Path) -> None:
    with pytest.raises(UsageError, match="--provider cuda, got --engine tensorrt"):
        choose_engine(Bundle.open(rtx_bundle), "tensorrt", provider="cuda", console=CONSOLE)


def test_unused_provider_is_named(rtx_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = object()
    monkeypatch.setattr(module, "_tensorrt", lambda *_: ChosenEngine(engine, "TensorRT.", 2, 9))
    choice = choose_engine(Bundle.open(rtx_bundle), provider="cuda", console=CONSOLE)
    assert choice.reason == (
        "TensorRT. --provider cuda has no effect without --engine onnxruntime."
    )
    assert (choice.engine, choice.min_tokens, choice.max_tokens) == (engine, 2, 9)
    assert choose_engine(Bundle.open(rtx_bundle), console=CONSOLE).reason == "TensorRT."
