"""Predictions of run time, and the calibration that measures them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aftserve.model.costs import (
    BATCH_LENGTHS,
    BATCHES,
    LENGTHS,
    MIN_BATCH_GAIN,
    CostModel,
    Measurement,
    calibrate,
    measure_chunks,
    measured_chunk,
)

FLAT = [Measurement(1, tokens, 1e-4 + 1e-6 * tokens) for tokens in (1, 64, 1024)]
"""Runs that take a tenth of a millisecond and a microsecond per token."""


def test_prediction_is_linear_between_lengths() -> None:
    assert math.isclose(CostModel(FLAT).single(500), 1e-4 + 500e-6)


def test_shorter_document_costs_as_shortest() -> None:
    assert CostModel([Measurement(1, 16, 2.0), Measurement(1, 32, 3.0)]).single(3) == 2.0


def test_token_cost_is_constant_past_longest() -> None:
    costs = CostModel([Measurement(1, 1024, 0.5), Measurement(1, 4096, 2.0)])
    assert math.isclose(costs.single(1 << 20), 2.0 * 256)


def test_quadratic_cost_continues_past_longest() -> None:
    costs = CostModel([Measurement(1, tokens, (tokens / 1024) ** 2) for tokens in (128, 512, 1024)])
    assert math.isclose(costs.single(8192), 64.0)


def test_one_slow_measurement_stays_linear() -> None:
    costs = CostModel([*FLAT, Measurement(1, 4096, 2 * 4096e-6)])
    assert costs.single(8192) == 2 * costs.single(4096)


def test_unmeasured_batch_costs_infinity() -> None:
    costs = CostModel([*FLAT, Measurement(2, 16, 1e-4), Measurement(4, 16, 1e-4)])
    assert costs.batch(5, 16) == math.inf
    assert costs.batch(2, 17) == math.inf
    assert costs.batch(3, 16) < math.inf


def test_batch_limits_follow_measured_gains() -> None:
    gaining = [Measurement(n, 16, 1e-4 + n * 16e-6) for n in (2, 4)]
    losing = [Measurement(n, 256, 3e-4 * n) for n in (2, 4)]
    costs = CostModel([Measurement(1, 16, 116e-6), Measurement(1, 256, 2e-4), *gaining, *losing])
    assert costs.batch_tokens == 16
    assert costs.batch_documents == 4
    published = {(m["documents"], m["tokens"]): m["pays"] for m in costs.to_dict()["measurements"]}
    assert published[4, 16]
    assert not published[4, 256]
    assert not published[1, 16]


def test_slow_model_measures_shorter_chunks() -> None:
    assert measured_chunk(CostModel(FLAT), 8192) == 8192
    assert measured_chunk(CostModel([Measurement(1, 1024, 1.0)]), 8192) == 2048
    assert measured_chunk(CostModel([Measurement(1, 1, 60.0)]), 8192) == 1


@pytest.mark.parametrize(
    ("chunk", "max_tokens", "expected"),
    [
        (100, 1000, [100, 200]),
        (100, 150, [75, 150]),
        (100, 60, [30, 60]),
        (1 << 21, 1 << 20, [1 << 19, 1 << 20]),
        (1, 2, [1, 2]),
    ],
)
def test_measured_chunks_fit_longest_document(
    chunk: int, max_tokens: int, expected: list[int]
) -> None:
    """A window may make one chunk longer than any document."""
    measured = measure_chunks(lambda tokens: None, chunk, max_tokens)
    assert [measurement.tokens for measurement in measured] == expected
    assert CostModel(FLAT, measured, max_tokens // 2).single(max_tokens) > 0


def test_chunked_token_costs_at_least_whole() -> None:
    slow_moment = [Measurement(1, 128, 3.4), Measurement(1, 256, 3.3)]
    costs = CostModel([Measurement(1, 64, 0.1), Measurement(1, 256, 0.5)], slow_moment, 8192)
    assert math.isclose(costs.single(128 + 256_000), 3.4 + 500.0)


def test_partial_chunk_costs_whole_chunk() -> None:
    in_chunks = [Measurement(1, 360, 0.01), Measurement(1, 720, 0.02)]
    costs = CostModel([Measurement(1, 1, 1e-3)], in_chunks, 1)
    assert costs.single(2) == costs.single(360) == 0.01


@given(tokens=st.integers(1, 1 << 20), documents=st.integers(1, 20))
def test_batch_prediction_is_positive(tokens: int, documents: int) -> None:
    costs = CostModel([*FLAT, *(Measurement(n, 64, 1e-4 * n) for n in BATCHES)])
    assert costs.batch(documents, tokens) > 0


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens", "budget"),
    [(1, 1, 16_384), (1, 300, 16_384), (20, 300, 16_384), (1, 1 << 20, 100)],
)
def test_calibration_stays_within_limits(min_tokens: int, max_tokens: int, budget: int) -> None:
    runs: list[tuple[int, int]] = []
    costs = calibrate(
        lambda *shape: runs.append(shape),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        budget_tokens=budget,
    )
    assert all(min_tokens <= tokens <= max_tokens for _, tokens in runs)
    assert all(documents * tokens <= budget for documents, tokens in runs)
    alone = {m.tokens for m in costs.measurements if m.documents == 1}
    longest = min(max_tokens, budget)
    assert alone == {min(max(length, min_tokens), longest) for length in LENGTHS}


@given(
    start=st.integers(0, 200),
    moment=st.tuples(st.integers(0, 9), st.just(10), st.just(0.0))  # several slow runs
    | st.tuples(st.just(1), st.just(1), st.floats(0, 100)),  # or a pause in one run
)
def test_slow_moment_keeps_measurements(start: int, moment: tuple[int, int, float]) -> None:
    length, factor, pause = moment
    slow = range(start, start + length)
    clock, calls = 0.0, 0

    def run(documents: int, tokens: int) -> None:
        nonlocal clock, calls
        seconds = 1e-4 + 1e-6 * documents * tokens
        clock += seconds * factor + pause if calls in slow else seconds
        calls += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aftserve.model.costs.time.perf_counter", lambda: clock)
        costs = calibrate(run, min_tokens=1, max_tokens=4096, budget_tokens=16_384)
    assert {(m.documents, m.tokens) for m in costs.measurements} == {
        *((1, tokens) for tokens in LENGTHS if tokens <= 4096),
        *((n, tokens) for n in BATCHES for tokens in BATCH_LENGTHS if n * tokens <= 16_384),
    }
    for found in costs.measurements:
        expected = 1e-4 + 1e-6 * found.documents * found.tokens
        assert math.isclose(found.seconds, expected, rel_tol=1e-9)


def test_slow_pair_costs_like_four() -> None:
    """A pair that measures slower than four documents is still run as one batch."""
    clock = 0.0

    def run(documents: int, tokens: int) -> None:
        nonlocal clock
        clock += 3e-4 if documents == 2 else 1e-4 + 1e-6 * documents * tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aftserve.model.costs.time.perf_counter", lambda: clock)
        costs = calibrate(run, min_tokens=1, max_tokens=64, budget_tokens=16_384)
    assert costs.batch(2, 16) == costs.batch(4, 16) < (1 - MIN_BATCH_GAIN) * 2 * costs.single(16)


def test_calibration_without_batching_measures_singles() -> None:
    sizes = set()
    costs = calibrate(
        lambda documents, tokens: sizes.add(documents),
        min_tokens=1,
        max_tokens=64,
        budget_tokens=16_384,
        batching=False,
    )
    assert sizes == {1}
    assert (costs.batch_documents, costs.batch_tokens) == (1, 0)
    assert math.isinf(costs.batch(2, 16))


@given(token_seconds=st.floats(1e-9, 10))
def test_calibration_stops_at_slow_lengths(token_seconds: float) -> None:
    clock, tried = 0.0, set[int]()

    def run(documents: int, tokens: int) -> None:
        nonlocal clock
        clock += token_seconds * documents * tokens
        tried.add(tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aftserve.model.costs.time.perf_counter", lambda: clock)
        calibrate(run, min_tokens=1, max_tokens=16_384, budget_tokens=16_384)
    fast = [tokens for tokens in LENGTHS if token_seconds * tokens < 0.4]
    assert tried >= set(fast)
    assert len(tried) <= len([tokens for tokens in LENGTHS if token_seconds * tokens < 0.6]) + 1
