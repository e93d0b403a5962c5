"""One engine and many clients: shared runs, disconnects, deadlines and failures."""

import asyncio
import gc
import json
import math
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from altered_bundles import DEAF, ENDLESS, hanging_bundle
from bundles import changed_manifest
from clients import eventually, head, http, metric, raw_connection
from rich.console import Console
from servers import serving

from aftexport.engines import RunStoppedError, Stop
from aftserve.errors import UnavailableError
from aftserve.model.classifier import Classifier
from aftserve.scheduling.batching import Running
from aftserve.scheduling.job import Job
from aftserve.scheduling.queue import JobQueue
from aftserve.scheduling.scheduler import Scheduler
from aftserve.server import load
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


def test_deadline_stops_the_run(address: str, grown: Grown) -> None:
    deadline = {"Deadline-Seconds": "5"}  # long enough for a busy machine to begin the run
    assert post(address, [ENDLESS], **deadline).status_code == 504
    eventually(lambda: grown(STOPPED) == 1, "the run is stopped")
    assert post(address, [5]).status_code == 200


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


def test_stalled_run_is_stopped(hanging: Path, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with serving(hanging, tmp_path / "log", *SOON) as (address, _):
        stalled = pool.submit(post, address, [ENDLESS])
        eventually(lambda: not idle(address), "the run begins")
        assert post(address, [5]).status_code == 200
        assert stalled.result().status_code == 500
        assert http.get(f"{address}/readyz").status_code == 200


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
    models = load(Settings.read([str(bundle), "--threads", "1"]), Console(quiet=True))
    (service,) = models.loaded()
    async with models.running():
        begun.clear()
        go_on.clear()
        yield service


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never happened")


def test_abandoned_texts_are_not_tokenized(
    tokenizing: tuple[list[str], threading.Event], bundle_folder: Path
) -> None:
    begun, go_on = tokenizing

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_short_texts_overtake_waiting_long_texts(
    tokenizing: tuple[list[str], threading.Event], bundle_folder: Path
) -> None:
    begun, go_on = tokenizing
    texts = ["a" * 100_000, "b" * 100_000, "c" * 100_000, "d" * 1000]

    async def scenario() -> None:
        async with running(bundle_folder, tokenizing) as service:
            tasks = [asyncio.create_task(service.classify([text], math.inf)) for text in texts]
            await until(lambda: len(begun) >= 2)
            assert sorted(text[0] for text in begun) == ["a", "d"]
            go_on.set()
            for text, answers in zip(texts, await asyncio.gather(*tasks), strict=True):
                assert answers[0].result.tokens_total == len(text)

    asyncio.run(scenario())


def test_answered_run_is_over(bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's next request may come before the engine's thread notes the end of the run."""
    go_on, end_run = threading.Event(), Scheduler._end_run

    def late(self: Scheduler) -> None:
        if isinstance(self._queue.state, Running):
            assert go_on.wait(60)
        end_run(self)

    async def scenario() -> None:
        models = load(Settings.read([str(bundle_folder), "--threads", "1"]), Console(quiet=True))
        (service,) = models.loaded()
        service.model.measurement.measure_all()
        async with models.running():
            try:
                await service.classify([[1, 2, 3]], math.inf)
                assert isinstance(service.scheduler._queue.state, Running)
                assert service.scheduler.running_documents == 0
                assert service.scheduler.predictions.wait_seconds(in_chunks=False) == 0
            finally:
                go_on.set()

    monkeypatch.setattr(Scheduler, "_end_run", late)
    asyncio.run(scenario())


def test_cancellation_at_run_start_stops_run(
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

    async def scenario() -> None:
        models = load(Settings.read([str(bundle_folder), "--threads", "1"]), Console(quiet=True))
        (service,) = models.loaded()
        service.model.measurement.measure_all()  # its runs would hang as well
        async with models.running():
            monkeypatch.setattr(service.model.classifier, "classify", hang)
            monkeypatch.setattr(JobQueue, "remove", late)
            service.scheduler._queue.pause(service.active)
            asking = asyncio.create_task(service.classify([[1, 2, 3]], math.inf))
            await until(lambda: service.scheduler.waiting_documents == 1)
            asking.cancel()
            await asyncio.wait({asking})
            await until(lambda: bool(stops))
            await until(lambda: stops[0].is_requested)

    asyncio.run(scenario())


def test_run_that_fails_after_end_logs_nothing(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio logs a traceback if an exception of a future is never read."""
    begun, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        assert go_on.wait(60)
        raise RunStoppedError

    async def scenario() -> None:
        models = load(Settings.read([str(bundle_folder), "--threads", "1"]), Console(quiet=True))
        (service,) = models.loaded()
        service.model.measurement.measure_all()  # its runs would hang as well
        monkeypatch.setattr(service.model.classifier, "classify", hang)
        async with models.running():
            asking = asyncio.create_task(service.classify([[1, 2, 3]], math.inf))
            await until(begun.is_set)
        with pytest.raises(UnavailableError):
            await asking
        run = service.scheduler._queue.current_run
        assert run is not None
        go_on.set()
        await until(run.ended.done)

    asyncio.run(scenario())
    gc.collect()
    assert "never retrieved" not in caplog.text
