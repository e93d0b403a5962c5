"""Predictions of run time from measurements."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from clocks import replace_time
from hypothesis import given
from hypothesis import strategies as st

from aftexport.engines import RunStoppedError, Stop
from aftexport.errors import EngineError
from aftserve.model import costs
from aftserve.model.costs import (
    BATCH_LENGTHS,
    BATCHES,
    LENGTHS,
    MIN_BATCH_GAIN,
    CostMeasurement,
    CostModel,
    MeasuredRange,
    Measurement,
    Shape,
    SlowdownFactor,
)

FLAT = [Measurement(1, tokens, 1e-4 + 1e-6 * tokens) for tokens in (1, 64, 1024)]
"""Runs that take a tenth of a millisecond and a microsecond per token."""


def costs_of(*lengths: tuple[int, float], **options: Any) -> CostModel:
    """Return the costs of single documents that took these seconds."""
    return CostModel([Measurement(1, *one) for one in lengths], **options)


SLOW_MOMENT = [Measurement(1, 128, 3.4), Measurement(1, 256, 3.3)]
IN_CHUNKS = [Measurement(1, 360, 0.01), Measurement(1, 720, 0.02)]


@pytest.mark.parametrize(
    ("model", "tokens", "seconds"),
    [
        (CostModel(FLAT), 500, 1e-4 + 500e-6),  # linear between two lengths
        (costs_of((16, 2.0), (32, 3.0)), 3, 2.0),  # as the shortest
        (costs_of((1024, 0.5), (4096, 2.0)), 1 << 20, 2.0 * 256),
        (costs_of(*((n, (n / 1024) ** 2) for n in (128, 512, 1024))), 8192, 64.0),
        (costs_of((512, 1.0), (4096, 12.0)), 8192, 24.0),  # the power 1.2 is noise
        (costs_of((64, 0.1), min_power=2.0), 640, 10.0),
        (costs_of((64, 0.1), min_power=2.0), 64, 0.1),
        (
            costs_of((64, 0.1), (256, 0.5), in_chunks=SLOW_MOMENT, whole_tokens=8192),
            128 + 256_000,
            3.4 + 500.0,
        ),
        (costs_of((512, 1.0), (4096, 12.0), quadratic_tokens=4096), 12_288, 72.0),
        (costs_of((64, 0.1), min_power=2.0, quadratic_tokens=64), 640, 10.0),
        (
            costs_of((1, 1e-3), chunk_tokens=2, whole_tokens=1, quadratic_tokens=2),
            100,
            4 * 50 * 1e-3 * (2 * 4 / 3) * (102 / 4),
        ),
        (
            costs_of((1, 1e-6), in_chunks=IN_CHUNKS, whole_tokens=1, quadratic_tokens=720),
            7200,
            0.2 * 11 / 2,
        ),
        (costs_of((1, 1e-3), in_chunks=IN_CHUNKS, whole_tokens=1), 2, 0.01),
        (costs_of((1, 1e-3), in_chunks=IN_CHUNKS, whole_tokens=1), 360, 0.01),  # a whole chunk
    ],
)
def test_single_document_costs(model: CostModel, tokens: int, seconds: float) -> None:
    assert math.isclose(model.single(tokens), seconds)


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


@given(tokens=st.integers(1, 1 << 20), documents=st.integers(1, 20))
def test_batch_prediction_is_positive(tokens: int, documents: int) -> None:
    costs = CostModel([*FLAT, *(Measurement(n, 64, 1e-4 * n) for n in BATCHES)])
    assert costs.batch(documents, tokens) > 0


def test_unmeasured_chunks_cost_more_than_whole() -> None:
    costs = CostModel(FLAT, whole_tokens=1024, chunk_tokens=512)
    assert costs.single(1024) == costs.whole(1024)
    assert costs.single(1025) > 2 * costs.whole(1025)
    assert math.isclose(costs.single(5120), costs.single(1025) * 10 / 3)


LONG = MeasuredRange(min_tokens=1, max_tokens=16_384, budget_tokens=16_384)
WITH_CHUNKS = MeasuredRange(
    min_tokens=1,
    max_tokens=20_000,
    budget_tokens=16_384,
    chunk_tokens=8192,
    max_chunked_tokens=1 << 20,
)


def linear(shape: Shape) -> float:
    """Return a tenth of a millisecond and a microsecond per token."""
    return 1e-4 + 1e-6 * shape.documents * shape.tokens


@dataclass
class Machine:
    """A machine whose clock only advances in its runs."""

    seconds: Callable[[Shape], float] = linear
    runs: list[Shape] = field(default_factory=list)
    clock: float = 0.0

    def run(self, shape: Shape, stop: Stop | None) -> None:
        self.runs.append(shape)
        self.clock += self.seconds(shape)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return watched(Machine(), monkeypatch)


def watched(machine: Machine, patch: pytest.MonkeyPatch) -> Machine:
    """Let the measurement read the machine's clock."""
    replace_time(patch, costs, perf_counter=lambda: machine.clock)
    return machine


def measured(machine: Machine, limits: MeasuredRange = LONG) -> CostMeasurement:
    with pytest.MonkeyPatch.context() as patch:
        measurement = CostMeasurement(watched(machine, patch).run, limits)
        measurement.measure_all()
    return measurement


def lengths(runs: Sequence[Shape]) -> list[int]:
    return [shape.tokens for shape in runs]


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens", "budget"),
    [(1, 1, 16_384), (1, 300, 16_384), (20, 300, 16_384), (1, 1 << 20, 100)],
)
def test_shapes_stay_within_limits(min_tokens: int, max_tokens: int, budget: int) -> None:
    machine = Machine()
    costs = measured(machine, MeasuredRange(min_tokens, max_tokens, budget)).costs
    assert all(min_tokens <= shape.tokens <= max_tokens for shape in machine.runs)
    assert all(shape.documents * shape.tokens <= budget for shape in machine.runs)
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
    machine = Machine()

    def seconds(shape: Shape) -> float:
        is_slow = start <= len(machine.runs) - 1 < start + length
        return linear(shape) * factor + pause if is_slow else linear(shape)

    machine.seconds = seconds
    costs = measured(machine, MeasuredRange(1, 4096, 16_384)).costs
    assert {(m.documents, m.tokens) for m in costs.measurements} == {
        *((1, tokens) for tokens in LENGTHS if tokens <= 4096),
        *((n, tokens) for n in BATCHES for tokens in BATCH_LENGTHS if n * tokens <= 16_384),
    }
    for found in costs.measurements:
        expected = linear(Shape(found.documents, found.tokens))
        assert math.isclose(found.seconds, expected, rel_tol=1e-9)


def test_slow_pair_costs_like_four() -> None:
    """A pair that measures slower than four documents is still run as one batch."""
    machine = Machine(lambda shape: 3e-4 if shape.documents == 2 else linear(shape))
    costs = measured(machine, MeasuredRange(1, 64, 16_384)).costs
    assert costs.batch(2, 16) == costs.batch(4, 16) < (1 - MIN_BATCH_GAIN) * 2 * costs.single(16)


def test_measurement_without_batching_has_singles() -> None:
    machine = Machine()
    costs = measured(machine, MeasuredRange(1, 64, 16_384, batching=False)).costs
    assert {shape.documents for shape in machine.runs} == {1}
    assert (costs.batch_documents, costs.batch_tokens) == (1, 0)
    assert math.isinf(costs.batch(2, 16))


@given(token_seconds=st.floats(1e-9, 10))
def test_measurement_stops_at_slow_lengths(token_seconds: float) -> None:
    machine = Machine(lambda shape: token_seconds * shape.documents * shape.tokens)
    measured(machine)
    tried = set(lengths(machine.runs))
    fast = [tokens for tokens in LENGTHS if token_seconds * tokens < 0.4]
    assert tried >= set(fast)
    assert len(tried) <= len([tokens for tokens in LENGTHS if token_seconds * tokens < 0.6]) + 1


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
def test_chunks_fit_longest_document(chunk: int, max_tokens: int, expected: list[int]) -> None:
    """A window may make one chunk longer than any document."""
    limits = MeasuredRange(
        1, 1, 16_384, chunk_tokens=chunk, min_chunk_tokens=chunk, max_chunked_tokens=max_tokens
    )
    machine = Machine(lambda shape: 1e-9)
    costs = measured(machine, limits).costs
    in_chunks = [shape for shape in machine.runs if shape.chunk_tokens is not None]
    assert sorted({shape.tokens for shape in in_chunks}) == expected
    assert {shape.chunk_tokens for shape in in_chunks} == {chunk}
    assert costs.single(max_tokens) > 0


@pytest.mark.parametrize(("token_seconds", "expected"), [(1e-6, 8192), (1e-3, 256), (60, 1)])
def test_slow_model_measures_shorter_chunks(token_seconds: float, expected: int) -> None:
    machine = Machine(lambda shape: token_seconds * shape.tokens)
    measured(machine, WITH_CHUNKS)
    assert machine.runs[-1].chunk_tokens == expected


def test_first_estimates_need_one_run_per_length(machine: Machine) -> None:
    measurement = CostMeasurement(machine.run, LONG)
    measurement.measure_first()
    assert lengths(machine.runs) == list(LENGTHS)
    assert not measurement.is_done
    assert measurement.costs.single(4096) >= linear(Shape(1, 4096))


@pytest.mark.parametrize("seconds", [0.6, 5.0, 1000.0])
def test_slow_machine_has_one_first_run(machine: Machine, seconds: float) -> None:
    machine.seconds = lambda shape: seconds
    CostMeasurement(machine.run, LONG).measure_first()
    assert lengths(machine.runs) == [1]


def test_slow_first_run_does_not_end_the_series(machine: Machine) -> None:
    """A busy machine may need milliseconds for the first run of a quick model."""
    quick = machine.seconds
    machine.seconds = lambda shape: 0.02 if not machine.runs[1:] else quick(shape)
    measurement = CostMeasurement(machine.run, LONG)
    measurement.measure_first()
    assert lengths(machine.runs) == list(LENGTHS)
    assert measurement.costs.single(2000) < 1


@given(fixed=st.floats(1e-6, 10), token=st.floats(1e-9, 0.1), square=st.floats(0, 1e-6))
def test_first_runs_are_bounded(fixed: float, token: float, square: float) -> None:
    """A run that is not the first one takes at most the time that its estimate allows."""
    machine = Machine(lambda shape: fixed + token * shape.tokens + square * shape.tokens**2)
    with pytest.MonkeyPatch.context() as patch:
        measurement = CostMeasurement(watched(machine, patch).run, LONG)
        measurement.measure_first()
    assert len(machine.runs) <= len(LENGTHS)
    beyond_linear = square * 64**2  # up to 64 tokens, a run is predicted by its length
    assert machine.clock <= max(machine.seconds(Shape(1, 1)), 0.5) * (1 + 1e-9) + beyond_linear


@given(
    fixed=st.floats(1e-6, 1),
    token=st.floats(1e-9, 1e-3),
    square=st.floats(0, 1e-6),
    tokens=st.integers(1, 1 << 20),
)
def test_estimates_are_never_optimistic(
    fixed: float, token: float, square: float, tokens: int
) -> None:
    """Until all single documents are measured, no prediction is below the real time.

    A chunk takes three times as long as a document of its length.
    """

    def whole(length: int) -> float:
        return fixed + token * length + square * length**2

    def seconds(shape: Shape) -> float:
        if shape.chunk_tokens is None:
            return whole(shape.tokens)
        return 3 * -(-shape.tokens // shape.chunk_tokens) * whole(shape.chunk_tokens)

    machine = Machine(seconds)
    chunk = 8192 if tokens > WITH_CHUNKS.max_tokens else None
    with pytest.MonkeyPatch.context() as patch:
        measurement = CostMeasurement(watched(machine, patch).run, WITH_CHUNKS)
        measurement.measure_first()
        while not measurement.is_done and machine.runs.count(Shape(1, 1)) < 3:
            above = measurement.costs.single(tokens) / seconds(Shape(1, tokens, chunk))
            # Between two lengths, a straight line is above a growing curve.
            assert above >= 1 - 1e-9
            measurement.step()


def test_stopped_step_is_repeated(machine: Machine) -> None:
    measurement = CostMeasurement(machine.run, LONG)
    measurement.measure_first()
    expected, count = measurement.next, len(machine.runs)

    def stopped(shape: Shape) -> float:
        machine.clock += 0.25
        raise RunStoppedError

    machine.seconds = stopped
    before = measurement.seconds
    with pytest.raises(RunStoppedError):
        measurement.step(Stop())
    assert measurement.next == expected
    assert measurement.seconds == before
    machine.seconds = linear
    measurement.step()
    assert machine.runs[count:] == [expected, expected]


FIRST_ESTIMATE = 0.99 * 4 * 128 * linear(Shape(1, 8192))
"""Minimum of the first estimates of 1,048,576 tokens in chunks."""


def measured_despite(
    machine: Machine, failing: Callable[[Shape], bool], limits: MeasuredRange
) -> CostMeasurement:
    """Do all steps, while runs of some shapes fail after the first run."""

    def seconds(shape: Shape) -> float:
        if failing(shape) and len(machine.runs) > 1:
            raise EngineError("out of memory", "Use less.")
        return linear(shape)

    machine.seconds = seconds
    measurement = CostMeasurement(machine.run, limits)
    while not measurement.is_done:
        with suppress(EngineError):
            measurement.step()
    return measurement


def test_failed_length_ends_the_series(machine: Machine) -> None:
    measurement = measured_despite(machine, lambda shape: shape.tokens > 1024, LONG)
    assert measurement.is_complete
    assert lengths(machine.runs).count(4096) == 1
    assert 16_384 not in lengths(machine.runs)
    assert measurement.costs.single(1024) == linear(Shape(1, 1024))
    assert measurement.costs.batch_documents == max(BATCHES)


def test_failed_batch_is_left_out(machine: Machine) -> None:
    measurement = measured_despite(machine, lambda shape: shape.documents > 4, LONG)
    assert measurement.is_complete
    assert measurement.costs.batch_documents == 4
    assert machine.runs.count(Shape(8, 16)) == 1


@pytest.mark.parametrize("fails", ["singles", "chunks"])
def test_failed_kind_keeps_first_estimates(machine: Machine, fails: str) -> None:
    measurement = measured_despite(
        machine, lambda shape: fails == "singles" or shape.chunk_tokens is not None, WITH_CHUNKS
    )
    assert measurement.is_done
    assert not measurement.is_complete
    assert measurement.costs.single(1 << 20) > FIRST_ESTIMATE


def test_complete_measurement(machine: Machine) -> None:
    measurement = CostMeasurement(machine.run, WITH_CHUNKS)
    measurement.measure_first()
    assert not measurement.is_complete
    measurement.measure_all()
    assert measurement.is_complete
    assert measurement.costs.single(1 << 20) < FIRST_ESTIMATE


def test_abandoned_measurement_keeps_estimates(machine: Machine) -> None:
    measurement = CostMeasurement(machine.run, LONG)
    measurement.measure_first()
    before = measurement.costs
    measurement.abandon()
    assert measurement.is_done
    assert not measurement.is_complete
    assert measurement.next_seconds == 0.0
    assert measurement.costs is before


def test_first_estimates_never_speed_predictions_up() -> None:
    slowdown = SlowdownFactor()
    slowdown.observe(100.0, 1.0)
    assert slowdown.value == 1.0


def test_trusted_costs_forget_fast_runs_of_estimates() -> None:
    slowdown = SlowdownFactor()
    slowdown.observe(100.0, 1.0)
    slowdown.trust_costs()
    assert slowdown.value == 1.0
    slowdown.observe(100.0, 20.0)
    assert slowdown.value < 0.5


def test_trusted_costs_keep_slow_runs() -> None:
    slowdown = SlowdownFactor()
    slowdown.observe(10.0, 40.0)
    before = slowdown.value
    slowdown.trust_costs()
    assert slowdown.value == before > 2
