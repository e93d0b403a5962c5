"""Decisions of the engine runner; the runs themselves need a GPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aftexport.engines import RunStoppedError, Stop, Tensors
from aftexport.engines.cuda import device
from aftexport.engines.tensorrt.engine import Profile, TensorrtEngine, bucket, choose_profile
from aftexport.errors import EngineError


class Parts(TensorrtEngine):
    """Two documents at once, and in the middle of the second part a client leaves."""

    input_names = ("input_ids", "lengths")
    max_batch = 2

    def __init__(self) -> None:
        self.stop = Stop()
        self.parts: list[int] = []

    def _run_part(self, inputs: Tensors) -> np.ndarray:
        self.parts.append(len(inputs["input_ids"]))
        if len(self.parts) == 2:
            self.stop.request()
        return np.zeros((len(inputs["input_ids"]), 3))


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
    assert engine.run(documents(5))["logits"].shape == (5, 3)
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
