"""Decisions of the engine runner; the runs themselves need a GPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aftexport.engines import RunStoppedError, Stop, Tensors
from aftexport.engines.cuda import device
from aftexport.engines.tensorrt.builder import check_types
from aftexport.engines.tensorrt.engine import (
    Profile,
    TensorrtEngine,
    bucket,
    choose_profile,
    without_padding,
)
from aftexport.engines.tensorrt.runtimes import LOGIT_TYPES
from aftexport.errors import EngineError


class Parts(TensorrtEngine):
    """Two documents at once, and in the middle of the second part a client leaves."""

    input_names = ("input_ids", "lengths")
    max_batch = 2
    _main, _features = "input_ids", ()

    def __init__(self) -> None:
        self.stop = Stop()
        self.types = dict.fromkeys(self.input_names, "int64")
        self.parts: list[int] = []

    def _run_part(self, inputs: Tensors) -> dict[str, np.ndarray]:
        self.parts.append(len(inputs["input_ids"]))
        if len(self.parts) == 2:
            self.stop.request()
        ids = inputs["input_ids"].astype(np.float32)
        padded = np.pad(ids, ((0, 0), (0, 3)), constant_values=np.nan)
        outputs = {"topic": ids[:, :1], "tags": padded[..., None]}
        return without_padding(outputs, ids.shape[1])


PROFILES = [
    Profile((1, 1), (1, 128), (4, 1000)),
    Profile((1, 1), (1, 900), (4, 1000)),
    Profile((1, 1), (1, 4000), (1, 8000)),
]


@given(st.integers(1, 1 << 20))
def test_bucket_holds_document_with_little_padding(tokens: int) -> None:
    padded = bucket(tokens, 1 << 20)
    assert tokens <= padded <= max(32, tokens * 1.25)
    assert bucket(padded, 1 << 20) == padded


@given(st.integers(1, 1 << 14), st.integers(1, 1 << 14))
def test_bucket_ends_at_engine_maximum(tokens: int, longest: int) -> None:
    if tokens <= longest:
        assert tokens <= bucket(tokens, longest) <= longest


def test_there_are_few_buckets() -> None:
    assert len({bucket(tokens, 16_384) for tokens in range(1, 16_385)}) == 1 + 4 * 9


@pytest.mark.parametrize(
    ("batch", "tokens", "chosen"), [(1, 1, 0), (4, 200, 0), (2, 700, 1), (1, 1000, 1), (1, 5000, 2)]
)
def test_profile_of_nearest_length_is_chosen(batch: int, tokens: int, chosen: int) -> None:
    assert choose_profile(PROFILES, batch, tokens) == chosen


@pytest.mark.parametrize(("batch", "tokens"), [(1, 8001), (5, 10), (2, 4000)])
def test_unsupported_shape_error_names_ranges(batch: int, tokens: int) -> None:
    with pytest.raises(EngineError, match=f"1 to 1000.*got {batch} documents of {tokens} tokens"):
        choose_profile(PROFILES, batch, tokens)


def test_missing_gpu_is_reported(no_gpu: None) -> None:
    with pytest.raises(EngineError, match="Expected a GPU, got none"):
        device()
    with pytest.raises(EngineError, match="CUDA"):
        TensorrtEngine(b"engine", "tensorrt_rtx")


def documents(count: int) -> Tensors:
    return {"input_ids": np.ones((count, 3), np.int64), "lengths": np.full(count, 3)}


def test_large_batch_runs_in_parts() -> None:
    engine = Parts()
    assert engine.run(documents(5))["topic"].shape == (5, 1)
    assert engine.parts == [2, 2, 1]


def test_stop_is_seen_between_parts() -> None:
    """It is seen before the first part too."""
    engine = Parts()
    with pytest.raises(RunStoppedError):
        engine.run(documents(5), engine.stop)
    assert engine.parts == [2, 2]
    with pytest.raises(RunStoppedError):
        engine.run(documents(5), engine.stop)
    assert engine.parts == [2, 2]


def test_parts_join_every_output() -> None:
    """Rows of a bucket's padding are left out of outputs for tokens."""
    ids = np.arange(6).reshape(3, 2)
    outputs = Parts().run({"input_ids": ids, "lengths": np.array([2, 2, 2])})
    np.testing.assert_array_equal(outputs["topic"], ids[:, :1])
    np.testing.assert_array_equal(outputs["tags"], ids[..., None])


@pytest.mark.parametrize("precision", LOGIT_TYPES)
def test_types_are_those_of_precision(precision: str) -> None:
    types = {"input_features": "float32", "lengths": "int64"}
    outputs = dict.fromkeys(("topic", "tags"), LOGIT_TYPES[precision])
    check_types("TensorRT", types | outputs, precision)
    with pytest.raises(EngineError, match="Expected tags of type"):
        check_types("TensorRT", types | outputs | {"tags": "int64"}, precision)
