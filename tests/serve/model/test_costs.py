"""Predictions of run time from measurements."""

import math

from hypothesis import given
from hypothesis import strategies as st

from aftserve.model.costs import BATCHES, CostModel, Measurement

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


def test_unmeasured_length_counts_squared() -> None:
    costs = CostModel([Measurement(1, 64, 0.1)], min_power=2.0)
    assert math.isclose(costs.single(640), 10.0)
    assert costs.single(64) == costs.single(1) == 0.1


def test_unmeasured_chunks_cost_more_than_whole() -> None:
    costs = CostModel(FLAT, whole_tokens=1024, chunk_tokens=512)
    assert costs.single(1024) == costs.whole(1024)
    assert costs.single(1025) > 2 * costs.whole(1025)
    assert math.isclose(costs.single(5120), costs.single(1025) * 10 / 3)
