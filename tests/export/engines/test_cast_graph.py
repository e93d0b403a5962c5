from pathlib import Path

import engines
import numpy as np
import onnx
import pytest

from aftexport.engines.cast_graph import has_bfloat16, widen
from aftexport.engines.onnxruntime import OnnxRuntimeEngine

INPUTS = {"input_ids": np.arange(40).reshape(2, 20), "lengths": np.array([20, 7])}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.graph(tmp_path_factory.mktemp("bf16"), "bf16")


def test_cast_graph_replaces_every_bfloat16(model: Path) -> None:
    graph = onnx.load(model)
    assert has_bfloat16(graph)
    widen(graph)
    assert not has_bfloat16(graph)
    onnx.checker.check_model(graph, full_check=False)


def test_the_weights_are_the_same_numbers(model: Path) -> None:
    narrow, wide = onnx.load(model), onnx.load(model)
    widen(wide)
    for before, after in zip(narrow.graph.initializer, wide.graph.initializer, strict=True):
        numbers = onnx.numpy_helper.to_array(before).astype(np.float64)
        np.testing.assert_array_equal(numbers, onnx.numpy_helper.to_array(after))


def test_onnxruntime_runs_the_graph_in_float32(model: Path, tmp_path: Path) -> None:
    logits = OnnxRuntimeEngine(model).run(INPUTS)["logits"]
    assert logits.dtype == np.float32
    full = OnnxRuntimeEngine(engines.graph(tmp_path, "fp32")).run(INPUTS)["logits"]
    difference = np.abs(logits - full).max()
    assert 0 < difference < 2e-2 * max(1, np.abs(full).max())
