from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.deploy.choose_engine import choose_engine
from aftexport.errors import EngineError, UsageError
from aftexport.pipeline.export import export

CONSOLE = Console(quiet=True)
INPUTS = {"input_ids": np.array([[5, 6, 7]]), "lengths": np.array([3])}


@pytest.mark.parametrize("asked", ["auto", "onnxruntime"])
def test_a_bundle_for_onnx_alone_is_served_by_onnxruntime(asked: str, bundle_folder: Path) -> None:
    choice = choose_engine(Bundle.open(bundle_folder), asked, console=CONSOLE)
    assert choice.engine.name == "onnxruntime"
    assert choice.max_tokens is None
    assert ("only to ONNX" if asked == "auto" else "--engine onnxruntime") in choice.reason


def test_tensorrt_takes_a_bundle_that_was_exported_for_it(bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="--to trt"):
        choose_engine(Bundle.open(bundle_folder), "tensorrt", console=CONSOLE)


def test_without_a_gpu_onnxruntime_takes_its_place_and_the_reason_is_said(
    no_gpu: None, rtx_bundle: Path
) -> None:
    bundle = Bundle.open(rtx_bundle)
    choice = choose_engine(bundle, console=CONSOLE)
    assert choice.engine.name == "onnxruntime"
    assert "Expected a GPU, got none" in choice.reason
    with pytest.raises(EngineError, match="Expected a GPU, got none"):
        choose_engine(bundle, "tensorrt", console=CONSOLE)


def test_a_bfloat16_graph_on_the_cpu_is_said_to_run_in_float32(
    no_gpu: None, checkpoint_file: Path, tmp_path: Path
) -> None:
    bundle = export(checkpoint_file, to="trt", precision="bf16", out=tmp_path / "b")
    choice = choose_engine(bundle, console=CONSOLE)
    assert "float32" in choice.reason
    assert np.isfinite(choice.engine.run(INPUTS)["logits"]).all()
