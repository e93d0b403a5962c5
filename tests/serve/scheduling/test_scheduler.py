"""One engine and many clients: shared runs, disconnects, deadlines and failures."""

import asyncio
import gc
import json
import math
import shutil
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from altered_bundles import DEAF, ENDLESS, hanging_bundle
from bundle_swaps import running_service, until
from bundles import changed_manifest
from clients import eventually, head, http, metric, raw_connection
from hypothesis import given
from hypothesis import strategies as st
from queued_jobs import MeasuringQueue, first, job, make_bundle, release
from rich.console import Console
from servers import serving

from aftexport.bundle.bundle import Bundle
from aftexport.engines import RunStoppedError, Stop
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftserve.errors import UnavailableError
from aftserve.model.classifier import Classifier
from aftserve.model.load import ActiveBundle, load_model
from aftserve.observability.metrics import Metrics
from aftserve.scheduling.batching import (
    Backlog,
    Idle,
    Job,
    Measuring,
    Progress,
    Result,
    Run,
    Running,
)
from aftserve.scheduling.queue import JobQueue
from aftserve.scheduling.scheduler import EngineThread, Predictions, Scheduler
from aftserve.serving.service import Service
from aftserve.settings import Settings
from aftserve.types import Tokens

RUNS = "aftserve_run_documents_count"
STOPPED = "aftserve_stopped_runs_total"
FAILED = "aftserve_failed_runs_total"
Grown = Callable[[str], float]

SOON = ("--stall-seconds", "5", "--max-queue-seconds", "300", "--threads", "1")
"""A stalled run is given up, late enough for other requests to queue on a busy machine."""
POISON = 300
"""A token id within the manifest's vocabulary, but beyond the model's embedding."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as executor:
        yield executor


@pytest.fixture(scope="module")
def hanging(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose model hangs on documents that begin with a certain token."""
    folder = tmp_path_factory.mktemp("hanging") / "hanging.bundle"
    shutil.copytree(bundle_folder, folder)
    changed_manifest(folder, {"vocab_size": POISON + 1})
    return hanging_bundle(folder)


@pytest.fixture(scope="module")
def address(hanging: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("scheduling") / "log"
    # A late run is predicted to last as long again: on a busy machine, beyond the defaults.
    # More threads would spin during a run that never ends.
    patient = ("--stall-seconds", "300", "--max-queue-seconds", "300", "--threads", "1")
    with serving(hanging, log, *patient, measured=True) as (address, _):
        yield address
    written = log.read_text("utf-8")
    assert "Traceback" not in written
    assert "never retrieved" not in written


@pytest.fixture
def grown(address: str) -> Grown:
    """Return the growth of a counter since the start of the test, when the server was idle."""
    eventually(lambda: idle(address), "the run of the previous test ends")
    started = {name: metric(address, name) for name in (RUNS, STOPPED, FAILED)}
    return lambda name: metric(address, name) - started[name]


def post(address: str, *documents: list[int], **headers: str) -> httpx.Response:
    return http.post(
        f"{address}/infer", json={"input_ids": list(documents)}, headers=headers, timeout=60
    )


@contextmanager
def asking(address: str, *documents: list[int]) -> Iterator[None]:
    """Keep an accepted request open during the block; then disconnect without its answer."""
    expected = metric(address, "aftserve_waiting_documents") + len(documents) - idle(address)
    body = json.dumps({"input_ids": documents}).encode()
    with raw_connection(address) as connection:
        connection.sendall(head(len(body)) + body)
        eventually(
            lambda: (
                metric(address, "aftserve_waiting_documents") == expected
                and metric(address, "aftserve_backlog_seconds") > 0
                and not idle(address)
            ),
            "the documents are accepted",
        )
        yield


def idle(address: str) -> bool:
    return metric(address, "aftserve_running_documents") == 0


def wait_for_documents(address: str, count: int) -> None:
    eventually(lambda: metric(address, "aftserve_waiting_documents") == count, f"{count} wait")


def test_waiting_short_documents_share_runs(
    address: str, pool: ThreadPoolExecutor, grown: Grown
) -> None:
    documents = np.random.default_rng(0).integers(0, 200, (24, 16)).tolist()
    single = [post(address, ids).json()["results"][0]["scores"] for ids in documents]
    with asking(address, [ENDLESS]):
        waiting = [pool.submit(post, address, ids) for ids in documents]
        wait_for_documents(address, 24)
    together = [answer.result().json()["results"][0]["scores"] for answer in waiting]
    for one, other in zip(together, single, strict=True):
        np.testing.assert_allclose(list(one.values()), list(other.values()), atol=1e-6)
    assert grown(RUNS) < 24 + 24


def test_short_lines_share_runs(address: str, pool: ThreadPoolExecutor, grown: Grown) -> None:
    lines = b"".join(json.dumps({"input_ids": [n] * 16}).encode() + b"\n" for n in range(24))
    kind = {"Content-Type": "application/x-ndjson"}
    with asking(address, [ENDLESS]):
        waiting = pool.submit(http.post, f"{address}/infer", content=lines, headers=kind)
        wait_for_documents(address, 24)
    assert b"status" not in waiting.result().content
    assert grown(RUNS) < 24


def test_disconnect_stops_run_and_queued_documents(address: str, grown: Grown) -> None:
    with asking(address, [ENDLESS], *[[5] * 400] * 3):
        assert metric(address, "aftserve_waiting_documents") == 3
    eventually(lambda: grown(STOPPED) == 1, "the run is stopped")
    eventually(lambda: idle(address), "the queue is empty")
    assert grown(RUNS) == 0
    assert post(address, [5]).status_code == 200


def test_departed_waiting_client_delays_no_request(
    address: str, pool: ThreadPoolExecutor, grown: Grown
) -> None:
    with asking(address, [ENDLESS]):
        with asking(address, *[[ENDLESS]] * 20):
            answer = pool.submit(post, address, [5])
            wait_for_documents(address, 21)
        wait_for_documents(address, 1)
    assert answer.result().status_code == 200
    eventually(lambda: grown(STOPPED) == 1, "the run is stopped")


def test_shared_run_lasts_until_last_disconnect(address: str, grown: Grown) -> None:
    def left() -> float:
        return metric(address, "aftserve_responses_total", path="/infer", status="499")

    gone, document = left(), [ENDLESS] * 16
    with ExitStack() as third, ExitStack() as second:
        with asking(address, document):
            second.enter_context(asking(address, document))
            third.enter_context(asking(address, document))
        eventually(lambda: metric(address, "aftserve_running_documents") == 2, "two share a run")
        second.close()
        eventually(lambda: left() == gone + 2, "the server notices")
        eventually(lambda: grown(STOPPED) == 1, "the run of the first is counted")
        assert metric(address, "aftserve_running_documents") == 2
    eventually(lambda: grown(STOPPED) == 2, "the run is stopped")


@pytest.mark.slow
def test_deadline_stops_the_run(address: str, grown: Grown) -> None:
    deadline = {"Deadline-Seconds": "5"}  # long enough for a busy machine to begin the run
    assert post(address, [ENDLESS], **deadline).status_code == 504
    eventually(lambda: grown(STOPPED) == 1, "the run is stopped")
    assert post(address, [5]).status_code == 200


@pytest.mark.slow
def test_deadline_ends_wait_in_queue(address: str, grown: Grown) -> None:
    with asking(address, [ENDLESS]):
        # The run has been late for less than the deadline, so the request is admitted.
        assert post(address, [5], **{"Deadline-Seconds": "5"}).status_code == 504
        eventually(
            lambda: metric(address, "aftserve_waiting_documents") == 0,
            "the document leaves the queue",
        )
        assert not idle(address)
        assert grown(STOPPED) == 0
    eventually(lambda: idle(address), "the other run is stopped")


def test_poisoned_document_fails_alone(
    address: str, pool: ThreadPoolExecutor, grown: Grown
) -> None:
    documents = [[number] * 16 for number in range(15)] + [[POISON] * 16]
    with asking(address, [ENDLESS]):
        answers = [pool.submit(post, address, ids) for ids in documents]
        wait_for_documents(address, 16)
    assert [answer.result().status_code for answer in answers] == [200] * 15 + [500]
    assert isinstance(answers[-1].result().json()["detail"], str)
    assert grown(FAILED) >= 2  # once in a shared run, and once in its own
    assert http.get(f"{address}/readyz").status_code == 200


def test_poisoned_document_fails_its_request(address: str) -> None:
    assert post(address, [5], [POISON], [6], [POISON]).status_code == 500
    assert post(address, [5], [6]).status_code == 200


@pytest.mark.slow
def test_stalled_run_is_stopped(hanging: Path, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with serving(hanging, tmp_path / "log", *SOON) as (address, _):
        stalled = pool.submit(post, address, [ENDLESS])
        eventually(lambda: not idle(address), "the run begins")
        assert post(address, [5]).status_code == 200
        assert stalled.result().status_code == 500
        assert http.get(f"{address}/readyz").status_code == 200


@pytest.mark.slow
def test_unstoppable_run_ends_the_process(
    hanging: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with serving(hanging, tmp_path / "log", *SOON) as (address, process):
        stalled = pool.submit(post, address, [DEAF])
        eventually(lambda: not idle(address), "the run begins")
        waiting = [pool.submit(post, address, [5]) for _ in range(5)]
        wait_for_documents(address, 5)
        assert [answer.result().status_code for answer in (stalled, *waiting)] == [503] * 6
        assert process.wait(30) == 1
    assert "cannot be stopped" in (tmp_path / "log").read_text("utf-8")


def test_many_disconnects_leave_no_documents(address: str, pool: ThreadPoolExecutor) -> None:
    def one(seed: int) -> int | None:
        generator = np.random.default_rng(seed)
        ids = generator.integers(0, 200, int(generator.integers(1, 3000))).tolist()
        if seed % 5:
            return post(address, ids).status_code
        body = json.dumps({"input_ids": [ids]}).encode()
        with raw_connection(address) as connection:
            connection.sendall(head(len(body)) + body)
        return None

    codes = list(pool.map(one, range(200)))
    assert set(codes) == {200, None}
    # The server may read requests of clients that have left only now.
    wait_for_documents(address, 0)
    eventually(lambda: idle(address), "the last run ends")


@pytest.fixture
def tokenizing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], threading.Event]]:
    """Yield the texts whose tokenization has begun, and the event for which it waits."""
    begun, go_on = list[str](), threading.Event()
    tokenize = Classifier.tokenize

    def late(self: Classifier, text: str) -> Tokens:
        begun.append(text)
        assert go_on.wait(60)
        return tokenize(self, text)

    go_on.set()
    monkeypatch.setattr(Classifier, "tokenize", late)
    yield begun, go_on
    go_on.set()


@asynccontextmanager
async def running(
    bundle: Path, tokenizing: tuple[list[str], threading.Event]
) -> AsyncIterator[Service]:
    """Yield a ready service whose tokenization waits for the event."""
    begun, go_on = tokenizing
    async with running_service(bundle) as service:
        begun.clear()
        go_on.clear()
        yield service


async def test_abandoned_texts_are_not_tokenized(
    tokenizing: tuple[list[str], threading.Event], bundle_folder: Path
) -> None:
    begun, go_on = tokenizing
    async with running(bundle_folder, tokenizing) as service:
        for letter in "ab":
            leaving = asyncio.create_task(service.classify([letter * 1000], math.inf))
            await until(lambda: bool(begun) and begun[-1][0] == letter)  # noqa: B023
            leaving.cancel()
            await asyncio.wait({leaving})
        waiting = [
            asyncio.create_task(service.classify([letter * 1000], math.inf)) for letter in "cde"
        ]
        await asyncio.sleep(0.5)
        waiting[1].cancel()
        await asyncio.wait({waiting[1]})
        assert [text[0] for text in begun] == ["a", "b"]
        go_on.set()
        await asyncio.wait(waiting)
        assert [task.cancelled() for task in waiting] == [False, True, False]
        assert sorted(text[0] for text in begun) == ["a", "b", "c", "e"]


async def test_short_texts_overtake_waiting_long_texts(
    tokenizing: tuple[list[str], threading.Event], bundle_folder: Path
) -> None:
    begun, go_on = tokenizing
    texts = ["a" * 100_000, "b" * 100_000, "c" * 100_000, "d" * 1000]
    async with running(bundle_folder, tokenizing) as service:
        tasks = [asyncio.create_task(service.classify([text], math.inf)) for text in texts]
        await until(lambda: len(begun) >= 2)
        assert sorted(text[0] for text in begun) == ["a", "d"]
        go_on.set()
        for text, answers in zip(texts, await asyncio.gather(*tasks), strict=True):
            assert answers[0].result.tokens_total == len(text)


async def test_answered_run_is_over(bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's next request may come before the engine's thread notes the end of the run."""
    go_on, end_run = threading.Event(), Scheduler._end_run

    def late(self: Scheduler) -> None:
        if isinstance(self._queue.state, Running):
            assert go_on.wait(60)
        end_run(self)

    monkeypatch.setattr(Scheduler, "_end_run", late)
    async with running_service(bundle_folder, measured=True) as service:
        try:
            await service.classify([[1, 2, 3]], math.inf)
            assert isinstance(service.scheduler._queue.state, Running)
            assert service.scheduler.running_documents == 0
            assert service.scheduler.predictions.wait_seconds(in_chunks=False) == 0
        finally:
            go_on.set()


async def test_cancellation_at_run_start_stops_run(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, stops = JobQueue.remove, list[Stop]()

    def hang(documents: Sequence[Tokens], stop: Stop, *parts: object) -> None:
        stops.append(stop)
        eventually(lambda: stop.is_requested, "the run is stopped")
        raise RunStoppedError

    def late(self: JobQueue, job: Job) -> bool:
        self.resume(job.active)
        eventually(lambda: bool(stops), "the run has begun")
        return remove(self, job)

    async with running_service(bundle_folder, measured=True) as service:
        monkeypatch.setattr(service.model.classifier, "classify", hang)
        monkeypatch.setattr(JobQueue, "remove", late)
        service.scheduler._queue.pause(service.active)
        asking = asyncio.create_task(service.classify([[1, 2, 3]], math.inf))
        await until(lambda: service.scheduler.waiting_documents == 1)
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: bool(stops))
        await until(lambda: stops[0].is_requested)


async def test_run_that_fails_after_end_logs_nothing(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio logs a traceback if an exception of a future is never read."""
    begun, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        assert go_on.wait(60)
        raise RunStoppedError

    async with running_service(bundle_folder, measured=True) as service:
        monkeypatch.setattr(service.model.classifier, "classify", hang)
        asking = asyncio.create_task(service.classify([[1, 2, 3]], math.inf))
        await until(begun.is_set)
    with pytest.raises(UnavailableError):
        await asking
    run = service.scheduler._queue.current_run
    assert run is not None
    go_on.set()
    await until(run.ended.done)
    del service, asking, run  # they refer to the future of the run
    gc.collect()
    assert "never retrieved" not in caplog.text


NAMES = "abc"


@pytest.fixture(scope="module")
def paced() -> list[ActiveBundle]:
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
    paced: list[ActiveBundle], documents: list[tuple[int, bool, bool, float]]
) -> None:
    queue, own, jobs = JobQueue(), Backlog(), list[Job]()
    for number, in_chunks, is_own, seconds in documents:
        jobs.append(job(seconds, paced[number]))
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


@pytest.mark.parametrize("yields", [False, True])
def test_measurement_that_stays_delays_documents(yields: bool) -> None:
    queue, future = MeasuringQueue(), Future[Any]()
    queue.measured_bundle()
    run = queue.next_run()
    run.predicted, run.ended = 30.0, future  # type: ignore[assignment]
    queue._state = Measuring(run, yields)
    predictions = Predictions(queue)
    found = predictions.wait_seconds(in_chunks=False)
    assert found == 0 if yields else 20 < found <= 30
    assert predictions.wait_seconds(in_chunks=False, counts_run=False) == 0
    assert predictions.backlog_seconds == 0  # of no document


def test_measurement_that_begins_meanwhile_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread may begin a measurement after a prediction has read the state."""
    queue = MeasuringQueue()
    queue.measured_bundle()
    run = queue.next_run()
    run.predicted = 30.0
    queue._state = Measuring(run, yields=True)
    monkeypatch.setattr(MeasuringQueue, "state", Idle(memory_of=None))
    assert Predictions(queue).wait_seconds(in_chunks=False) == 0


def test_replaced_model_predicts_waiting_documents() -> None:
    """A fallback replaces the model of a bundle while its documents wait."""
    queue, active, slow = JobQueue(), make_bundle(), make_bundle().model
    predictions, one = Predictions(queue), job(3.0, active)
    queue.put(one)
    assert predictions.backlog_seconds == pytest.approx(3.0)
    slow.slowdown.observe(1e3, 4e3)
    active.model = slow
    assert predictions.backlog_seconds == pytest.approx(3.0 * slow.slowdown.value)
    run = queue.take(first, None, release)  # type: ignore[arg-type]
    assert run is not None
    assert run.model is slow
    assert queue._backlog.bundles == {}


LONG = np.random.default_rng(0).integers(0, 250, 30_000)
"""A document that runs in chunks within a memory budget of 1 MiB."""


@pytest.fixture(scope="module")
def bundles(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[ActiveBundle]:
    folder, bundles = tmp_path_factory.mktemp("models"), list[ActiveBundle]()
    for name in "ab":
        place = Path(shutil.copytree(bundle_folder, folder / f"{name}.bundle"))
        settings = Settings.read([str(place), "--threads", "1", "--memory-budget-mib", "1"])
        bundle = Bundle.open(place)
        model = load_model(bundle, settings, Console(quiet=True))
        bundles.append(ActiveBundle(bundle, model))
    assert [active.model.name for active in bundles] == ["a", "b"]
    return bundles


@asynccontextmanager
async def serving_runs(scheduler: Scheduler) -> AsyncIterator[None]:
    task = asyncio.create_task(scheduler.serve())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def make_scheduler() -> Scheduler:
    return Scheduler(budget_tokens=16_384, stall_seconds=300.0, idle_seconds=math.inf)


def submit(
    scheduler: Scheduler,
    active: ActiveBundle,
    ids: Sequence[int],
    metrics: Metrics | None = None,
) -> "asyncio.Future[Result]":
    of_model = (metrics or Metrics()).of(active.model.name)
    return scheduler.submit(Job(active, np.array(ids), math.inf, of_model))


def scores(result: Result) -> list[float]:
    return list(result.answer.heads["logits"].scores.values())


async def test_engine_releases_memory_for_other_model(
    bundles: list[ActiveBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every run, no other engine keeps the memory of an earlier one."""
    holders, order = set[OnnxRuntimeEngine](), list[OnnxRuntimeEngine]()
    run, release = OnnxRuntimeEngine.run, OnnxRuntimeEngine.release

    def checked_run(self: OnnxRuntimeEngine, *given: object) -> object:
        assert holders <= {self}
        holders.add(self)
        order.append(self)
        return run(self, *given)  # type: ignore[arg-type]

    def checked_release(self: OnnxRuntimeEngine) -> None:
        holders.discard(self)
        release(self)

    documents = [[number] * 16 for number in range(40)]
    expected = [
        list(
            bundles[0].model.classifier.classify([np.array(ids)])[0].heads["logits"].scores.values()
        )
        for ids in documents
    ]

    metrics = Metrics()
    for name in "ab":
        metrics.of(name)
    monkeypatch.setattr(OnnxRuntimeEngine, "run", checked_run)
    monkeypatch.setattr(OnnxRuntimeEngine, "release", checked_release)
    scheduler = make_scheduler()
    futures = [
        submit(scheduler, bundles[number % 2], ids, metrics) for number, ids in enumerate(documents)
    ]
    async with serving_runs(scheduler):
        for future, one in zip(futures, expected, strict=True):
            np.testing.assert_allclose(scores(await future), one, atol=1e-5)
    assert set(order) == {active.model.classifier.engine for active in bundles}
    text = metrics.exposition()[0].decode()
    for name in "ab":
        assert f'aftserve_run_documents_sum{{model="{name}"}} 20.0' in text


async def test_other_models_run_between_parts(bundles: list[ActiveBundle]) -> None:
    """Also the memory that a short document leaves is released before its model's next part."""
    answered = list[str]()
    assert bundles[0].model.classifier.in_chunks(len(LONG))
    scheduler = make_scheduler()
    futures = {
        "kept memory": submit(scheduler, bundles[0], [5] * 16),
        "long": submit(scheduler, bundles[0], LONG),  # type: ignore[arg-type]
        "short": submit(scheduler, bundles[1], [5] * 16),
    }
    for name, future in futures.items():
        future.add_done_callback(lambda _, name=name: answered.append(name))  # type: ignore[misc]
    async with serving_runs(scheduler):
        await asyncio.gather(*futures.values())
    assert answered == ["kept memory", "short", "long"]


async def test_run_after_unload_counts_nothing(
    bundles: list[ActiveBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves during a run, and the model's metrics are forgotten before its end."""
    begun, go_on, metrics = threading.Event(), threading.Event(), Metrics()

    def hang(*_: object) -> None:
        begun.set()
        assert go_on.wait(60)
        raise RunStoppedError

    monkeypatch.setattr(bundles[1].model.classifier, "classify", hang)
    scheduler = make_scheduler()
    async with serving_runs(scheduler):
        left = submit(scheduler, bundles[1], [5], metrics)
        assert await asyncio.to_thread(begun.wait, 60)
        left.cancel()
        metrics.forget("b")
        go_on.set()
        run = scheduler._queue.current_run
        assert run is not None
        await asyncio.wait({run.ended})
        await submit(scheduler, bundles[0], [5], metrics)
    text = metrics.exposition()[0]
    assert b'model="a"' in text
    assert b'model="b"' not in text


async def test_pause_holds_only_one_bundle(bundles: list[ActiveBundle]) -> None:
    scheduler = make_scheduler()
    async with serving_runs(scheduler):
        with scheduler.paused(bundles[0]):
            held = submit(scheduler, bundles[0], [5])
            await submit(scheduler, bundles[1], [5])
            assert not held.done()
            assert scheduler.waiting_documents == 1
        await held


async def test_measurements_of_all_models_end(bundles: list[ActiveBundle]) -> None:
    scheduler = make_scheduler()
    for active in bundles * 2:  # the second time has no effect
        scheduler.measure(active.model)
    async with serving_runs(scheduler):
        while any(scheduler.is_measuring(active.model) for active in bundles):
            assert await scheduler.wait_for_measurement(60)
    assert all(active.model.measurement.is_complete for active in bundles)
    scheduler.forget(bundles[0].model)
    assert not scheduler.is_measuring(bundles[0].model)


async def test_failed_release_is_named(
    bundles: list[ActiveBundle], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: OnnxRuntimeEngine) -> None:
        raise EngineError("no memory", "Restart the process.")

    monkeypatch.setattr(OnnxRuntimeEngine, "release", fail)
    scheduler = make_scheduler()
    async with serving_runs(scheduler):
        for active in bundles:
            await submit(scheduler, active, [5])
    assert "the model a did not release its memory: no memory" in caplog.text
    assert "0 documents" not in caplog.text


class FailingMeasurement:
    """A measurement whose step fails after another error."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error

    def step(self, stop: Stop) -> None:
        error, self._error = self._error, None
        assert error is not None
        try:
            raise ValueError("the first error")
        except ValueError:
            raise error from None


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "kind", [RunStoppedError, lambda: EngineError("no memory", "Use less."), RuntimeError]
)
async def test_failed_run_is_freed_at_once(kind: Any, no_collection: None) -> None:
    """Without this, an unloaded model keeps its memory until the next full garbage collection."""
    model: Any = SimpleNamespace(measurement=FailingMeasurement(kind()))
    future = asyncio.get_running_loop().create_future()
    runs = [Run((), model, 0.0, 0.0, future, measures=True)]
    left, over = weakref.ref(runs[0]), asyncio.Event()
    del model, future
    EngineThread(lambda: runs.pop() if runs else None, lambda run: None, over.set)
    await asyncio.wait_for(over.wait(), 60)
    assert left() is None
