"""The predicted wait of documents, each by the slowdown of its own model."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued_jobs import first, job, make_bundle, release

from aftserve.model.load import ActiveBundle
from aftserve.scheduling.batching import Backlog, Job, Progress
from aftserve.scheduling.queue import JobQueue
from aftserve.scheduling.scheduler import Predictions

NAMES = "abc"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def bundles() -> list[ActiveBundle]:
    """Bundles whose models are about as fast as measured, half as fast, and a fifth as fast."""
    bundles = [make_bundle(name) for name in NAMES]
    for active, factor in zip(bundles, (1, 2, 5), strict=True):
        active.model.slowdown.observe(1e3, 1e3 * factor)
    return bundles


def predicted(jobs: list[Job]) -> float:
    return sum(one.seconds * one.active.model.slowdown.value for one in jobs)


@given(
    st.lists(
        st.tuples(st.integers(0, len(NAMES) - 1), st.booleans(), st.booleans(), st.floats(0, 1e3)),
        max_size=30,
    )
)
def test_each_job_counts_by_its_model(
    loop: asyncio.AbstractEventLoop,
    bundles: list[ActiveBundle],
    documents: list[tuple[int, bool, bool, float]],
) -> None:
    queue, own, jobs = JobQueue(), Backlog(), list[Job]()
    for number, in_chunks, is_own, seconds in documents:
        jobs.append(job(loop, seconds, bundles[number]))
        if in_chunks:
            jobs[-1].progress = Progress(None, left=1)  # type: ignore[arg-type]
        if is_own:
            jobs[-1].backlog = own
        queue.put(jobs[-1])
    predictions = Predictions(queue)
    whole = [one for one in jobs if one.progress is None]
    others = [one for one in jobs if one.backlog is not own]
    for found, counted in [
        (predictions.backlog_seconds, jobs),
        (predictions.wait_seconds(in_chunks=False), whole),
        (predictions.wait_seconds(in_chunks=True, besides=own), others),
    ]:
        assert found == pytest.approx(predicted(counted), rel=1e-9, abs=1e-6)
        assert counted or found == 0


def test_replaced_model_predicts_waiting_documents(loop: asyncio.AbstractEventLoop) -> None:
    """A fallback replaces the model of a bundle while its documents wait."""
    queue, active, slow = JobQueue(), make_bundle(), make_bundle().model
    predictions, one = Predictions(queue), job(loop, 3.0, active)
    queue.put(one)
    assert predictions.backlog_seconds == pytest.approx(3.0)
    slow.slowdown.observe(1e3, 4e3)
    active.model = slow
    assert predictions.backlog_seconds == pytest.approx(3.0 * slow.slowdown.value)
    run = queue.take(first, None, release)  # type: ignore[arg-type]
    assert run is not None
    assert run.model is slow
    assert queue.backlog().bundles == {}
