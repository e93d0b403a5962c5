"""Reload on SIGHUP: bundles that are accepted or refused, and the PyTorch reference."""

import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
from altered_bundles import always, coarse_kernels, use_coarsest_method
from bundle_swaps import (
    LENGTHS,
    damage,
    deploy,
    digest,
    documents,
    expected_scores,
    last_reload,
    post,
    served_digest,
)
from bundles import of_links
from clients import eventually, http, metric
from servers import serving

import aftplugins


def test_reload_under_load_loses_nothing(
    served_folder: Path, bundle_folder: Path, other_bundle: Path, tmp_path: Path
) -> None:
    bundles = {digest(b): expected_scores(b) for b in (bundle_folder, other_bundle)}
    first, second = bundles
    assert not np.allclose([*bundles[first].values()], [*bundles[second].values()], atol=0.01)
    seen: list[str] = []
    stopping = threading.Event()

    def client(seed: int) -> int:
        generator, answered = np.random.default_rng(seed), 0
        while not stopping.is_set():
            sent = [documents()[i] for i in generator.integers(0, len(LENGTHS), 3)]
            response = post(address, *sent)
            assert response.status_code == 200, response.text
            results = response.json()["results"]
            assert len({result["bundle"] for result in results}) == 1
            for ids, result in zip(sent, results, strict=True):
                expected = bundles[result["bundle"]][tuple(ids)]
                np.testing.assert_allclose(list(result["scores"].values()), expected, atol=1e-5)
                seen.append(result["bundle"])
            answered += 1
        return answered

    # On a busy machine, first estimates after a reload may be minutes.
    patient = ("--max-queue-seconds", "3600", "--deadline-seconds", "3600", "--threads", "1")
    with serving(served_folder, tmp_path / "log", *patient) as (address, process):
        with ThreadPoolExecutor(6) as pool, ExitStack() as stack:
            stack.callback(stopping.set)  # also after a failure
            clients = [pool.submit(client, seed) for seed in range(6)]

            def is_answered_by(bundle: str, since: int) -> bool:
                return bundle in seen[since:] or any(running.done() for running in clients)

            eventually(lambda: is_answered_by(first, 0), "the first bundle answers")
            for count, bundle in enumerate((other_bundle, bundle_folder, other_bundle), 1):
                before = len(seen)
                deploy(bundle, served_folder)
                process.send_signal(signal.SIGHUP)
                eventually(
                    lambda: metric(address, "aftserve_reloads_total", outcome="served") == count,  # noqa: B023
                    "the reload has ended",
                )
                assert served_digest(address) == digest(bundle)
                eventually(
                    lambda: is_answered_by(digest(bundle), before),  # noqa: B023
                    "the bundle answers",
                )
            stopping.set()
            assert all(answered.result() > 0 for answered in clients)
        assert metric(address, "aftserve_bundle_info", bundle=second) == 1
        assert metric(address, "aftserve_bundle_info", bundle=first) == 0
        assert metric(address, "aftserve_failed_runs_total") == 0
    changes = [b for a, b in pairwise(seen) if a != b]
    assert {first, second} == set(seen)
    assert len(changes) >= 3
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(damage, "model.onnx was changed"), (shutil.rmtree, "no such folder"), (always, "golden")],
    ids=["damaged", "removed", "wrong scores"],
)
def test_reload_refuses_bad_bundle(
    harm: Callable[[Path], object],
    reason: str,
    served_folder: Path,
    other_bundle: Path,
    tmp_path: Path,
) -> None:
    """The first bundle stays in service until a valid one replaces the bad one."""
    first = digest(served_folder)
    with serving(served_folder, tmp_path / "log", "--threads", "1") as (address, process):
        before = post(address, *documents()).json()["results"]
        harm(deploy(other_bundle, served_folder))
        process.send_signal(signal.SIGHUP)
        eventually(lambda: last_reload(address) is not None, "the reload has ended")
        reload = last_reload(address)
        assert reload is not None
        assert reason in str(reload["problem"])
        assert str(served_folder.parent) not in str(reload["problem"])
        assert metric(address, "aftserve_reloads_total", outcome="refused") == 1
        assert served_digest(address) == first
        assert http.get(f"{address}/readyz").status_code == 200
        after = post(address, *documents()).json()["results"]
        # The runs may batch the documents differently, which changes rounding.
        for one, other in zip(after, before, strict=True):
            assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)
        deploy(other_bundle, served_folder)
        process.send_signal(signal.SIGHUP)
        eventually(lambda: served_digest(address) == digest(other_bundle), "the reload succeeds")
    log = (tmp_path / "log").read_text("utf-8")
    assert reason in log
    assert "Traceback" not in log


def test_reload_follows_links_of_volume(
    bundle_folder: Path, other_bundle: Path, tmp_path: Path
) -> None:
    """Kubernetes updates a mounted ConfigMap by a link to the folder of the new files."""
    volume = of_links(bundle_folder, "volume", tmp_path)
    shutil.copytree(other_bundle, volume / "..2026_01_02")

    def point_to(folder: str) -> None:
        (volume / "..new").symlink_to(folder)
        (volume / "..new").rename(volume / "..data")

    with serving(volume, tmp_path / "log", "--threads", "1") as (address, process):
        assert served_digest(address) == digest(bundle_folder)
        point_to("..absent")
        process.send_signal(signal.SIGHUP)
        eventually(lambda: last_reload(address) is not None, "the reload has ended")
        assert "is a link to ..data/manifest.json" in str(last_reload(address))
        point_to("..2026_01_02")
        process.send_signal(signal.SIGHUP)
        eventually(
            lambda: served_digest(address) == digest(other_bundle), "the new files are served"
        )
        assert post(address, *documents()).status_code == 200


def test_reload_falls_back_from_coarse_kernels(
    served_folder: Path, other_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if aftplugins.library("onnxruntime") is None:
        pytest.skip("no fused kernels are built here")
    use_coarsest_method(monkeypatch)
    with serving(served_folder, tmp_path / "log", "--on-breach", "fallback") as (address, process):
        coarse = coarse_kernels(deploy(other_bundle, served_folder))
        process.send_signal(signal.SIGHUP)
        eventually(lambda: served_digest(address) == digest(coarse), "the reload succeeds")
        assert http.get(f"{address}/parity").json()["within"]
        assert post(address, [5]).status_code == 200


def test_reference_follows_reloaded_bundle(
    served_folder: Path,
    checkpoint_file: Path,
    other_bundle: Path,
    other_checkpoint: Path,
    tmp_path: Path,
) -> None:
    model = Path(shutil.copy(checkpoint_file, tmp_path / "model.pt"))
    with serving(served_folder, tmp_path / "log", "--reference", str(model)) as (address, process):

        def compare() -> httpx.Response:
            return http.post(f"{address}/parity", json={"text": "An invoice."}, timeout=120)

        assert compare().json()["within"]
        deploy(other_bundle, served_folder)
        Path(shutil.copy(other_checkpoint, tmp_path / "new.pt")).replace(model)
        assert compare().json()["within"]  # PyTorch loaded the checkpoint before its replacement
        process.send_signal(signal.SIGHUP)
        eventually(lambda: served_digest(address) == digest(other_bundle), "the reload succeeds")
        check = compare().json()
        assert check["within"], check


def test_parity_refuses_mismatched_reference(
    served_folder: Path, checkpoint_file: Path, other_bundle: Path, tmp_path: Path
) -> None:
    options = ("--reference", str(checkpoint_file))
    with serving(served_folder, tmp_path / "log", *options) as (address, _):
        deploy(other_bundle, served_folder)  # PyTorch loads only at the first comparison
        answer = http.post(f"{address}/parity", json={"text": "a"}, timeout=120)
        assert answer.status_code == 503
        assert http.get(f"{address}/readyz").status_code == 200
    assert "the server has another bundle" in (tmp_path / "log").read_text("utf-8")
