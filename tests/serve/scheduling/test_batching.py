"""The choice of documents that share a run."""

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aftserve.model.costs import CostModel, Measurement
from aftserve.scheduling.batching import Job, next_batch

RUN, TOKEN = 1e-3, 1e-6
"""Seconds of a run, and seconds for each of its tokens: short documents gain by sharing."""

LENGTHS = (1, 16, 64, 256, 1024, 4096)
ANY: Any = object()
COSTS = CostModel(Measurement(n, t, RUN + n * t * TOKEN) for n in (1, 2, 4, 8) for t in LENGTHS)
NO_GAIN = CostModel(
    [
        *(Measurement(1, t, t * TOKEN) for t in LENGTHS),
        *(Measurement(n, t, n * t * TOKEN) for n in (2, 4) for t in LENGTHS),
    ]
)


def waiting(
    *tokens: int, costs: CostModel = COSTS, promised: float = 1e9, active: Any = None
) -> list[Job]:
    future: Any = Future()
    return [
        Job(active, np.zeros(n, np.int64), promised, ANY, future, costs.single(n)) for n in tokens
    ]


def chosen(
    jobs: list[Job], costs: CostModel = COSTS, budget: int = 4096, **given: object
) -> list[int]:
    options = {"budget_tokens": budget, "masks_padding": True, "now": 0.0} | given
    return [jobs.index(job) for job in next_batch(jobs, costs, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        ((20, 22, 18), {}, [0, 1, 2]),
        ((20, 20, 20), {"costs": NO_GAIN}, [0]),
        ((20, 4000, 21), {}, [0, 2]),
        ([20] * 20, {}, [*range(8)]),
        ((20, 30, 20), {"budget": 60}, [0, 1]),
        ((20, 30, 20), {"budget": 1}, [0]),
        ((20, 21, 20), {"masks_padding": False}, [0, 2]),
    ],
    ids=["similar", "no gain", "other length", "measured size", "budget", "alone", "equal lengths"],
)
def test_batch_has_documents_that_gain(
    tokens: Sequence[int], options: dict[str, Any], expected: list[int]
) -> None:
    jobs = waiting(*tokens, costs=options.get("costs", COSTS))
    assert chosen(jobs, **options) == expected


def test_documents_of_two_models_run_apart() -> None:
    before, after = (waiting(20, 20, 20, active=object()) for _ in range(2))
    assert chosen([before[0], after[0], before[1], after[1]]) == [0, 2]
    assert chosen([after[0], before[0], after[1]]) == [0, 2]


def test_failed_document_is_retried_alone() -> None:
    jobs = waiting(20, 20, 20)
    jobs[1].single = True
    assert chosen(jobs) == [0, 2]
    assert chosen(jobs[1:]) == [0]


def test_late_document_is_not_overtaken() -> None:
    jobs = waiting(20, 4000, 21)
    jobs[1].promised = 0.001
    assert chosen(jobs) == [0]


@given(
    tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=90),
    promised=st.floats(0, 1),
    budget=st.integers(1, 20_000),
    masks_padding=st.booleans(),
)
def test_batch_has_oldest_and_keeps_limits(
    tokens: list[int], promised: float, budget: int, masks_padding: bool
) -> None:
    jobs = waiting(*tokens, promised=promised)
    batch = [jobs[i] for i in chosen(jobs, budget=budget, masks_padding=masks_padding)]
    assert batch[0] is jobs[0]
    width = max(job.tokens for job in batch)
    assert len(batch) == 1 or len(batch) * width <= budget
    assert len(batch) == 1 or width <= 1.5 * min(job.tokens for job in batch)
    single = sum(job.seconds for job in batch)
    assert len(batch) == 1 or COSTS.batch(len(batch), width) < single


def test_overtaking_delays_one_batch_at_most() -> None:
    tokens = np.random.default_rng(0).integers(1, 3000, 200).tolist()
    jobs = waiting(*tokens)
    total = list(accumulate(job.seconds for job in jobs))
    for job, seconds in zip(jobs, total, strict=True):
        job.promised = seconds
    queue, now, finished = list(jobs), 0.0, {}
    while queue:
        batch = next_batch(queue, COSTS, budget_tokens=4096, masks_padding=True, now=now)
        now += COSTS.batch(len(batch), max(job.tokens for job in batch))
        for job in batch:
            queue.remove(job)
            finished[job.promised] = now
    assert len(finished) == len(jobs)
    # A document that is overtaken ends at most one batch after its promise.
    assert all(end <= promise + COSTS.batch(8, 4096) for promise, end in finished.items())
