"""Reload of a service in this process: accepted documents, and refusals."""

import asyncio
import gc
import signal
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from bundle_swaps import (
    LENGTHS,
    accept,
    damage,
    deploy,
    digest,
    documents,
    expected_scores,
    load_models,
    running_service,
    until,
)
from clients import eventually, http
from servers import serving

from aftserve.api.api_keys import make_key
from aftserve.errors import UnavailableError
from aftserve.model import reload
from aftserve.model.classifier import Classifier
from aftserve.model.reload import ReloadError


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable the garbage collector: reference counts must release an old bundle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_accepted_documents_keep_old_bundle(
    served_folder: Path, bundle_folder: Path, other_bundle: Path, no_collection: None
) -> None:
    """The old bundle answers documents that it accepted, and is then released."""
    expected = expected_scores(bundle_folder)
    async with running_service(served_folder) as service:
        old: weakref.ref[Classifier] = weakref.ref(service.model.classifier)
        deadline = time.monotonic() + 60
        deploy(other_bundle, served_folder)
        with service.scheduler.paused(service.active):
            accepted = await accept(service)
            await service.reloader.run()
            assert service.active.bundle.digest == digest(other_bundle)
            with service.scheduler.paused(service.active):
                later = asyncio.create_task(service.classify(documents(), deadline))
                await until(lambda: service.scheduler.waiting_documents >= 2 * len(LENGTHS))
                assert old() is not None
        for answer, ids in zip(await accepted, documents(), strict=True):
            result = answer.result
            assert result.bundle == digest(bundle_folder)
            np.testing.assert_allclose(
                list(result.scores.values()), expected[tuple(ids)], atol=1e-5
            )
        assert {one.result.bundle for one in await later} == {digest(other_bundle)}
        del accepted, later, answer, result
        await until(lambda: old() is None)


async def test_fallback_loads_in_turn(served_folder: Path) -> None:
    async with running_service(served_folder, "--on-breach", "fallback") as service:
        async with service.shared.loader.turn:
            service._handle_breach(service.active, "a document differs")
            for _ in range(100):
                await asyncio.sleep(0.01)
            assert not service.model.uses_standard_ops_only
        await until(lambda: service.model.uses_standard_ops_only)
        await service.classify(documents(), time.monotonic() + 60)


async def test_reload_does_not_wait_for_fallback(served_folder: Path) -> None:
    """Accepted documents of the old bundle wait for its fallback, which has a later turn."""
    async with running_service(served_folder, "--on-breach", "fallback") as service:
        before = service.active
        async with service.shared.loader.turn:
            reloading = service.reloader.start()
            await asyncio.sleep(0)
            service._handle_breach(before, "a document differs")
            accepted = await accept(service)
        assert (await reloading).problem is None
        assert service.active is not before
        await accepted
        assert before.model.uses_standard_ops_only
        assert not service.model.uses_standard_ops_only
        assert service.health.ready


async def test_chunked_document_keeps_old_bundle(
    served_folder: Path, bundle_folder: Path, other_bundle: Path
) -> None:
    ids = np.random.default_rng(1).integers(0, 250, 30_000)
    models = load_models(served_folder, "--memory-budget-mib", "1")
    (service,) = models.loaded()
    assert service.model.classifier.in_chunks(len(ids))
    expected = service.model.classifier.chunked.run(ids)["logits"]  # type: ignore[union-attr]
    weights = np.exp(expected[0] - expected[0].max())
    async with models.running():
        deadline = time.monotonic() + 60
        deploy(other_bundle, served_folder)
        with service.scheduler.paused(service.active):
            accepted = asyncio.create_task(service.classify([ids], deadline))
            await asyncio.sleep(0)
            await service.reloader.run()
        (answer,) = await accepted
    result = answer.result
    assert result.bundle == digest(bundle_folder)
    np.testing.assert_allclose(list(result.scores.values()), weights / weights.sum(), atol=1e-5)


async def test_stopped_service_refuses_reload(served_folder: Path) -> None:
    async with running_service(served_folder) as service:
        service.reloader.close()
        with pytest.raises(UnavailableError):
            await service.reloader.run()


async def test_reload_refuses_changed_bundle(
    served_folder: Path, other_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = reload.load_model

    def load_and_replace(*given: object) -> object:
        model = loading(*given)  # type: ignore[arg-type]
        deploy(other_bundle, served_folder)
        return model

    monkeypatch.setattr(reload, "load_model", load_and_replace)
    async with running_service(served_folder) as service:
        before = service.active
        with pytest.raises(ReloadError, match="changed while it was read"):
            await service.reloader.run()
        assert service.active is before


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Return the keys file, an administrator's key and a key without that right."""
    (admin, first), (other, second) = (
        make_key("admin", "100/second", admin=True),
        make_key("other", None),
    )
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(f"{first}\n{second}\n")
    return file, admin, other


def _slow(seconds: float) -> tuple[str, str]:
    """Return arguments of Python for a server whose reloads take longer."""
    return (
        "-c",
        "import sys, time; from aftserve.model import reload\n"
        "load = reload.load_model\n"
        f"reload.load_model = lambda *given: (time.sleep({seconds}), load(*given))[1]\n"
        "from aftserve.cli import main; sys.exit(main())",
    )


def request_reload(address: str, key: str | None) -> httpx.Response:
    headers = {"X-API-Key": key} if key is not None else {}
    return http.post(f"{address}/reload", headers=headers, timeout=60)


def test_only_administrator_may_request_reload(
    served_folder: Path, other_bundle: Path, keys: tuple[Path, str, str], tmp_path: Path
) -> None:
    file, admin, other = keys
    with serving(served_folder, tmp_path / "log", "--api-keys", str(file)) as (address, _):
        assert request_reload(address, None).status_code == 401
        refused = request_reload(address, other)
        assert refused.status_code == 403
        assert "--admin" in refused.json()["detail"]
        deploy(other_bundle, served_folder)
        done = request_reload(address, admin)
        assert done.status_code == 200, done.text
        assert done.json()["bundle"] == digest(other_bundle)
        damage(served_folder)
        bad = request_reload(address, admin)
        assert bad.status_code == 409
        assert "model.onnx was changed" in bad.json()["detail"]
        headers = {"X-API-Key": other}
        answer = http.post(f"{address}/infer", json={"text": "a"}, headers=headers)
        assert answer.json()["bundle"] == digest(other_bundle)


def test_reload_endpoint_needs_api_keys(server: str) -> None:
    assert request_reload(server, None).status_code == 404
    assert "/reload" not in http.get(f"{server}/openapi.json").json()["paths"]


@pytest.mark.slow
def test_waiting_requests_share_one_reload(
    served_folder: Path, other_bundle: Path, keys: tuple[Path, str, str], tmp_path: Path
) -> None:
    """Requests during a reload wait for one more, which all of them share."""
    file, admin, _ = keys
    options = ("--api-keys", str(file))
    with (
        serving(served_folder, tmp_path / "log", *options, program=_slow(5)) as (address, _),
        ThreadPoolExecutor(6) as pool,
    ):
        deploy(other_bundle, served_folder)
        pending = [pool.submit(request_reload, address, admin) for _ in range(6)]
        answers = [future.result() for future in pending]
        log = (tmp_path / "log").read_text("utf-8")
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["bundle"] for answer in answers} == {digest(other_bundle)}
    assert 1 <= log.count("reloading ") <= 2


def test_stop_during_reload_ends_server(
    served_folder: Path, other_bundle: Path, keys: tuple[Path, str, str], tmp_path: Path
) -> None:
    file, admin, _ = keys
    options = ("--api-keys", str(file), "--drain-seconds", "1")
    with (
        serving(served_folder, tmp_path / "log", *options, program=_slow(1000)) as (
            address,
            process,
        ),
        ThreadPoolExecutor(2) as pool,
    ):
        deploy(other_bundle, served_folder)
        pending = [pool.submit(request_reload, address, admin) for _ in range(2)]
        log = tmp_path / "log"
        eventually(lambda: "reloading " in log.read_text("utf-8"), "the reload begins")
        headers = {"X-API-Key": admin}
        answer = http.post(f"{address}/infer", json={"text": "a"}, headers=headers)
        assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert {future.result().status_code for future in pending} == {503}
        assert process.wait(30) == 0
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")
