"""Another bundle takes the place of the one that is served, and nobody loses an answer."""

import asyncio
import gc
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
import tiny_models
import torch
from biased_model import always, coarse_kernels
from bundles import of_links
from clients import eventually, http, metric
from rich.console import Console
from servers import serving

import aftexport
import aftplugins
from aftexport.bundle.bundle import Bundle
from aftexport.pipeline.export import export
from aftserve.api.api_keys import make_key
from aftserve.errors import UnavailableError
from aftserve.model.classifier import Classifier
from aftserve.model.reload import ReloadError
from aftserve.server import load
from aftserve.service import Service
from aftserve.settings import Settings

LENGTHS = (1, 16, 300, 20, 2000, 16, 40, 700)


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same kind that answers otherwise."""
    model = tiny_models.classifier()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-0.9)
    path = tmp_path_factory.mktemp("other") / "model.pt"
    aftexport.save(
        path,
        model=model,
        labels=tiny_models.LABELS,
        tokenizer=tiny_models.byte_tokenizer().to_str(),
    )
    return path


@pytest.fixture(scope="module")
def other_bundle(other_checkpoint: Path) -> Path:
    folder = other_checkpoint.with_name("other.bundle")
    export(other_checkpoint, to="onnx", out=folder)
    return folder


@pytest.fixture
def place(bundle_folder: Path, tmp_path: Path) -> Path:
    """Where the server finds its bundle, the first to begin with."""
    return put(bundle_folder, tmp_path / "served.bundle")


def put(bundle: Path, place: Path) -> Path:
    """Moves a copy of a bundle into place, as a deployment does."""
    copy = Path(shutil.copytree(bundle, place.with_suffix(".new")))
    if place.exists():
        place.rename(place.with_suffix(f".{time.monotonic_ns()}"))
    return copy.rename(place)


def digest(bundle: Path) -> str:
    return Bundle.open(bundle).digest


def documents() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 250, length).tolist() for length in LENGTHS]


def scores_of(bundle: Path) -> dict[tuple[int, ...], list[float]]:
    """What each document is to be answered, from a run of it alone."""
    settings = Settings.read([str(bundle), "--threads", "1"])
    classifier = load(settings, Console(quiet=True)).model.classifier
    return {
        tuple(ids): list(classifier.classify([np.array(ids)])[0].scores.values())
        for ids in documents()
    }


def post(address: str, *given: list[int]) -> httpx.Response:
    return http.post(f"{address}/infer", json={"input_ids": list(given)}, timeout=60)


def last_reload(address: str) -> dict[str, object] | None:
    return http.get(f"{address}/info").json()["last_reload"]  # type: ignore[no-any-return]


def live(address: str) -> str:
    return str(http.get(f"{address}/info").json()["bundle"])


def test_reload_under_load_loses_nothing(
    place: Path, bundle_folder: Path, other_bundle: Path, tmp_path: Path
) -> None:
    bundles = {digest(b): scores_of(b) for b in (bundle_folder, other_bundle)}
    first, second = bundles
    assert not np.allclose([*bundles[first].values()], [*bundles[second].values()], atol=0.01)
    seen: list[str] = []
    stopping = threading.Event()

    def client(seed: int) -> int:
        generator, answered = np.random.default_rng(seed), 0
        while not stopping.is_set():
            asked = [documents()[i] for i in generator.integers(0, len(LENGTHS), 3)]
            response = post(address, *asked)
            assert response.status_code == 200, response.text
            results = response.json()["results"]
            assert len({result["bundle"] for result in results}) == 1
            for ids, result in zip(asked, results, strict=True):
                expected = bundles[result["bundle"]][tuple(ids)]
                np.testing.assert_allclose(list(result["scores"].values()), expected, atol=1e-5)
                seen.append(result["bundle"])
            answered += 1
        return answered

    options = ("--threads", "1")
    with serving(place, tmp_path / "log", *options) as (address, process):
        with ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(client, seed) for seed in range(6)]
            for count, bundle in enumerate((other_bundle, bundle_folder, other_bundle), 1):
                put(bundle, place)
                process.send_signal(signal.SIGHUP)
                eventually(
                    lambda: metric(address, "aftserve_reloads_total", outcome="served") == count,  # noqa: B023
                    "it is reloaded",
                )
                assert live(address) == digest(bundle)
            stopping.set()
            assert all(answered.result() > 0 for answered in clients)
        assert metric(address, "aftserve_bundle_info", bundle=second) == 1
        assert metric(address, "aftserve_bundle_info", bundle=first) == 0
        assert metric(address, "aftserve_failed_runs_total") == 0
    changes = [b for a, b in pairwise(seen) if a != b]
    assert {first, second} == set(seen)
    assert len(changes) >= 3
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


def damaged(bundle: Path) -> None:
    with (bundle / "model.onnx").open("r+b") as file:
        file.seek(100)
        file.write(b"\0\0\0\0")


def gone(bundle: Path) -> None:
    shutil.rmtree(bundle)


def outside_its_bound(bundle: Path) -> None:
    always(bundle)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(damaged, "model.onnx was changed"), (gone, "no such folder"), (outside_its_bound, "golden")],
)
def test_reload_refuses_bad_bundle(
    harm: object, reason: str, place: Path, other_bundle: Path, tmp_path: Path
) -> None:
    first = digest(place)
    with serving(place, tmp_path / "log", "--threads", "1") as (address, process):
        before = post(address, *documents()).json()["results"]
        harm(put(other_bundle, place))  # type: ignore[operator]
        process.send_signal(signal.SIGHUP)
        eventually(lambda: last_reload(address) is not None, "it was tried")
        reload = last_reload(address)
        assert reload is not None
        assert reason in str(reload["problem"])
        assert str(place.parent) not in str(reload["problem"])
        assert metric(address, "aftserve_reloads_total", outcome="refused") == 1
        assert live(address) == first
        assert http.get(f"{address}/readyz").status_code == 200
        after = post(address, *documents()).json()["results"]
        for one, other in zip(after, before, strict=True):  # shared runs round otherwise
            assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)
        put(other_bundle, place)
        process.send_signal(signal.SIGHUP)
        eventually(lambda: live(address) == digest(other_bundle), "a good one is served")
    log = (tmp_path / "log").read_text("utf-8")
    assert reason in log
    assert "Traceback" not in log


def test_reload_follows_links_of_volume(
    bundle_folder: Path, other_bundle: Path, tmp_path: Path
) -> None:
    """As Kubernetes updates a mounted ConfigMap: by a link to the folder of the new files."""
    place = of_links(bundle_folder, "volume", tmp_path)
    shutil.copytree(other_bundle, place / "..2026_01_02")

    def point_to(folder: str) -> None:
        (place / "..new").symlink_to(folder)
        (place / "..new").rename(place / "..data")

    with serving(place, tmp_path / "log", "--threads", "1") as (address, process):
        assert live(address) == digest(bundle_folder)
        point_to("..gone")
        process.send_signal(signal.SIGHUP)
        eventually(lambda: last_reload(address) is not None, "it was tried")
        assert "is a link to ..data/manifest.json" in str(last_reload(address))
        point_to("..2026_01_02")
        process.send_signal(signal.SIGHUP)
        eventually(lambda: live(address) == digest(other_bundle), "the new files are served")
        assert post(address, *documents()).status_code == 200


def test_reload_falls_back_from_coarse_kernels(
    place: Path, other_bundle: Path, tmp_path: Path
) -> None:
    if aftplugins.library("onnxruntime") is None:
        pytest.skip("no fused kernels are built here")
    with serving(place, tmp_path / "log", "--on-breach", "fallback") as (address, process):
        coarse = coarse_kernels(put(other_bundle, place))
        process.send_signal(signal.SIGHUP)
        eventually(lambda: live(address) == digest(coarse), "it is served")
        assert http.get(f"{address}/parity").json()["within"]
        assert post(address, [5]).status_code == 200


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The file, the key of an administrator, and one of somebody else."""
    (admin, first), (other, second) = (
        make_key("admin", "100/second", admin=True),
        make_key("other", None),
    )
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(f"{first}\n{second}\n")
    return file, admin, other


def ask_reload(address: str, key: str | None) -> httpx.Response:
    headers = {"X-API-Key": key} if key is not None else {}
    return http.post(f"{address}/reload", headers=headers, timeout=60)


def test_only_administrator_may_request_reload(
    place: Path, other_bundle: Path, keys: tuple[Path, str, str], tmp_path: Path
) -> None:
    file, admin, other = keys
    with serving(place, tmp_path / "log", "--api-keys", str(file)) as (address, _):
        assert ask_reload(address, None).status_code == 401
        refused = ask_reload(address, other)
        assert refused.status_code == 403
        assert "--admin" in refused.json()["detail"]
        put(other_bundle, place)
        done = ask_reload(address, admin)
        assert done.status_code == 200, done.text
        assert done.json()["bundle"] == digest(other_bundle)
        damaged(place)
        bad = ask_reload(address, admin)
        assert bad.status_code == 409
        assert "model.onnx was changed" in bad.json()["detail"]
        headers = {"X-API-Key": other}
        answer = http.post(f"{address}/infer", json={"text": "a"}, headers=headers)
        assert answer.json()["bundle"] == digest(other_bundle)


def test_reload_endpoint_needs_api_keys(server: str) -> None:
    assert ask_reload(server, None).status_code == 404
    assert "/reload" not in http.get(f"{server}/openapi.json").json()["paths"]


def test_waiting_requests_share_one_reload(
    place: Path, bundle_folder: Path, other_bundle: Path, keys: tuple[Path, str, str],
    tmp_path: Path,
) -> None:  # fmt: skip
    file, admin, _ = keys
    with (
        serving(place, tmp_path / "log", "--api-keys", str(file)) as (address, _),
        ThreadPoolExecutor(6) as pool,
    ):
        put(other_bundle, place)
        asked = [pool.submit(ask_reload, address, admin) for _ in range(6)]
        done = [one.result() for one in asked]
        log = (tmp_path / "log").read_text("utf-8")
    assert {one.status_code for one in done} == {200}
    assert {one.json()["bundle"] for one in done} == {digest(other_bundle)}
    assert 1 <= log.count("reloading ") <= 2


def test_stop_during_reload_ends_server(
    place: Path, other_bundle: Path, keys: tuple[Path, str, str], tmp_path: Path
) -> None:
    file, admin, _ = keys
    slow = (
        "-c",
        "import sys, time; from aftserve.model import reload\n"
        "load = reload.load_model\n"
        "reload.load_model = lambda *given: (time.sleep(1000), load(*given))[1]\n"
        "from aftserve.cli import main; sys.exit(main())",
    )
    options = ("--api-keys", str(file), "--drain-seconds", "1")
    with (
        serving(place, tmp_path / "log", *options, program=slow) as (address, process),
        ThreadPoolExecutor(2) as pool,
    ):
        put(other_bundle, place)
        asked = [pool.submit(ask_reload, address, admin) for _ in range(2)]
        log = tmp_path / "log"
        eventually(lambda: "reloading " in log.read_text("utf-8"), "it has begun")
        headers = {"X-API-Key": admin}
        answer = http.post(f"{address}/infer", json={"text": "a"}, headers=headers)
        assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert {one.result().status_code for one in asked} == {503}
        assert process.wait(30) == 0
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


def service_of(place: Path, *options: str) -> Service:
    return load(Settings.read([str(place), "--threads", "1", *options]), Console(quiet=True))


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is released must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_accepted_documents_keep_old_bundle(
    place: Path, bundle_folder: Path, other_bundle: Path, no_collection: None
) -> None:
    expected = scores_of(bundle_folder)

    async def scenario() -> None:
        service = service_of(place)
        old: weakref.ref[Classifier] = weakref.ref(service.model.classifier)
        async with service.running():
            deadline = time.monotonic() + 60
            put(other_bundle, place)
            with service.scheduler.paused():
                accepted = asyncio.create_task(service.classify(documents(), deadline))
                while service.scheduler.waiting_documents < len(LENGTHS):
                    await asyncio.sleep(0.01)
                await service.reloader.run()
                assert service.active.bundle.digest == digest(other_bundle)
                later = asyncio.create_task(service.classify(documents(), deadline))
                while service.scheduler.waiting_documents < 2 * len(LENGTHS):
                    await asyncio.sleep(0.01)
                assert old() is not None
            for result, ids in zip(await accepted, documents(), strict=True):
                assert result.bundle == digest(bundle_folder)
                np.testing.assert_allclose(
                    list(result.scores.values()), expected[tuple(ids)], atol=1e-5
                )
            assert {result.bundle for result in await later} == {digest(other_bundle)}
            del accepted, later, result
            for _ in range(100):
                if old() is None:
                    break
                await asyncio.sleep(0.05)
            assert old() is None

    asyncio.run(scenario())


def test_chunked_document_keeps_old_bundle(
    place: Path, bundle_folder: Path, other_bundle: Path
) -> None:
    ids = np.random.default_rng(1).integers(0, 250, 30_000)

    async def scenario() -> None:
        service = service_of(place, "--memory-budget-mib", "1")
        assert service.model.classifier.in_chunks(len(ids))
        expected = service.model.classifier.chunked.run(ids)["logits"]  # type: ignore[union-attr]
        weights = np.exp(expected[0] - expected[0].max())
        async with service.running():
            deadline = time.monotonic() + 60
            put(other_bundle, place)
            with service.scheduler.paused():
                accepted = asyncio.create_task(service.classify([ids], deadline))
                await asyncio.sleep(0)
                await service.reloader.run()
            (result,) = await accepted
        assert result.bundle == digest(bundle_folder)
        np.testing.assert_allclose(list(result.scores.values()), weights / weights.sum(), atol=1e-5)

    asyncio.run(scenario())


def test_stopped_service_refuses_reload(place: Path) -> None:
    async def scenario() -> None:
        service = service_of(place)
        async with service.running():
            service.reloader.close()
            with pytest.raises(UnavailableError):
                await service.reloader.run()

    asyncio.run(scenario())


def test_reload_refuses_changed_bundle(
    place: Path, other_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aftserve.model import reload

    loading = reload.load_model

    def load_and_replace(*given: object) -> object:
        model = loading(*given)  # type: ignore[arg-type]
        put(other_bundle, place)
        return model

    async def scenario() -> None:
        service = service_of(place)
        async with service.running():
            before = service.active
            with pytest.raises(ReloadError, match="changed while it was read"):
                await service.reloader.run()
            assert service.active is before

    monkeypatch.setattr(reload, "load_model", load_and_replace)
    asyncio.run(scenario())


def test_reference_follows_reloaded_bundle(
    place: Path, checkpoint_file: Path, other_bundle: Path, other_checkpoint: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copy(checkpoint_file, tmp_path / "model.pt"))
    with serving(place, tmp_path / "log", "--reference", str(model)) as (address, process):

        def compare() -> httpx.Response:
            return http.post(f"{address}/parity", json={"text": "An invoice."}, timeout=120)

        assert compare().json()["within"]
        put(other_bundle, place)
        Path(shutil.copy(other_checkpoint, tmp_path / "new.pt")).replace(model)
        assert compare().json()["within"]  # PyTorch had both before they were replaced
        process.send_signal(signal.SIGHUP)
        eventually(lambda: live(address) == digest(other_bundle), "it is reloaded")
        check = compare().json()
        assert check["within"], check


def test_parity_refuses_mismatched_reference(
    place: Path, checkpoint_file: Path, other_bundle: Path, tmp_path: Path
) -> None:
    options = ("--reference", str(checkpoint_file))
    with serving(place, tmp_path / "log", *options) as (address, _):
        put(other_bundle, place)  # before PyTorch was first asked
        answer = http.post(f"{address}/parity", json={"text": "a"}, timeout=120)
        assert answer.status_code == 503
        assert http.get(f"{address}/readyz").status_code == 200
    assert "the server has another bundle" in (tmp_path / "log").read_text("utf-8")
