"""One scheduler with several real models."""

import asyncio
import math
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.engines import RunStoppedError
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftserve.model.load import ActiveBundle, load_model
from aftserve.observability.metrics import Metrics
from aftserve.scheduling.batching import Result
from aftserve.scheduling.scheduler import Scheduler
from aftserve.settings import Settings

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
async def serving(scheduler: Scheduler) -> AsyncIterator[None]:
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
    return scheduler.submit(active, np.array(ids), math.inf, of_model)


def scores(result: Result) -> list[float]:
    return list(result.answer.heads["logits"].scores.values())


def test_engine_releases_memory_for_other_model(
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

    async def scenario() -> None:
        scheduler = make_scheduler()
        futures = [
            submit(scheduler, bundles[number % 2], ids, metrics)
            for number, ids in enumerate(documents)
        ]
        async with serving(scheduler):
            for future, one in zip(futures, expected, strict=True):
                np.testing.assert_allclose(scores(await future), one, atol=1e-5)

    monkeypatch.setattr(OnnxRuntimeEngine, "run", checked_run)
    monkeypatch.setattr(OnnxRuntimeEngine, "release", checked_release)
    asyncio.run(scenario())
    assert set(order) == {active.model.classifier.engine for active in bundles}
    text = metrics.exposition()[0].decode()
    for name in "ab":
        assert f'aftserve_run_documents_sum{{model="{name}"}} 20.0' in text


def test_other_models_run_between_parts(bundles: list[ActiveBundle]) -> None:
    """Also the memory that a short document leaves is released before its model's next part."""
    answered = list[str]()

    async def scenario() -> None:
        scheduler = make_scheduler()
        futures = {
            "kept memory": submit(scheduler, bundles[0], [5] * 16),
            "long": submit(scheduler, bundles[0], LONG),  # type: ignore[arg-type]
            "short": submit(scheduler, bundles[1], [5] * 16),
        }
        for name, future in futures.items():
            future.add_done_callback(lambda _, name=name: answered.append(name))  # type: ignore[misc]
        async with serving(scheduler):
            await asyncio.gather(*futures.values())

    assert bundles[0].model.classifier.in_chunks(len(LONG))
    asyncio.run(scenario())
    assert answered == ["kept memory", "short", "long"]


def test_run_after_unload_counts_nothing(
    bundles: list[ActiveBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves during a run, and the model's metrics are forgotten before its end."""
    begun, go_on, metrics = threading.Event(), threading.Event(), Metrics()

    def hang(*_: object) -> None:
        begun.set()
        assert go_on.wait(60)
        raise RunStoppedError

    async def scenario() -> None:
        scheduler = make_scheduler()
        async with serving(scheduler):
            left = submit(scheduler, bundles[1], [5], metrics)
            assert await asyncio.to_thread(begun.wait, 60)
            left.cancel()
            metrics.forget("b")
            go_on.set()
            await scheduler.wait_for_run_of(bundles[1].model)
            await submit(scheduler, bundles[0], [5], metrics)

    monkeypatch.setattr(bundles[1].model.classifier, "classify", hang)
    asyncio.run(scenario())
    text = metrics.exposition()[0]
    assert b'model="a"' in text
    assert b'model="b"' not in text


def test_pause_holds_only_one_bundle(bundles: list[ActiveBundle]) -> None:
    async def scenario() -> None:
        scheduler = make_scheduler()
        async with serving(scheduler):
            with scheduler.paused(bundles[0]):
                held = submit(scheduler, bundles[0], [5])
                await submit(scheduler, bundles[1], [5])
                assert not held.done()
                assert scheduler.waiting_documents == 1
            await held

    asyncio.run(scenario())


def test_measurements_of_all_models_end(bundles: list[ActiveBundle]) -> None:
    async def scenario() -> None:
        scheduler = make_scheduler()
        for active in bundles * 2:  # the second time has no effect
            scheduler.measure(active.model)
        async with serving(scheduler):
            while any(scheduler.is_measuring(active.model) for active in bundles):
                assert await scheduler.wait_for_measurement(60)
        assert all(active.model.measurement.is_complete for active in bundles)
        scheduler.forget(bundles[0].model)
        assert not scheduler.is_measuring(bundles[0].model)

    asyncio.run(scenario())


def test_failed_release_is_named(
    bundles: list[ActiveBundle], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: OnnxRuntimeEngine) -> None:
        raise EngineError("no memory", "Restart the process.")

    async def scenario() -> None:
        scheduler = make_scheduler()
        async with serving(scheduler):
            for active in bundles:
                await submit(scheduler, active, [5])

    monkeypatch.setattr(OnnxRuntimeEngine, "release", fail)
    asyncio.run(scenario())
    assert "the model a did not release its memory: no memory" in caplog.text
    assert "0 documents" not in caplog.text
