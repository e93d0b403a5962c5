"""Comparisons of the server with PyTorch: at its start, on request, and of live documents."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tiny_models
import torch
from altered_bundles import ODD, coarse_kernels, large_batches, odd_first_token, use_coarsest_method
from clients import eventually, http, metric
from numpy.typing import NDArray
from rich.console import Console
from servers import serving

import aftexport
import aftplugins
from aftexport.bundle.bundle import Bundle
from aftexport.errors import UsageError
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.parity import TOLERANCES
from aftexport.parity.run_cases import verify
from aftexport.pipeline.export import export
from aftserve.parity.reference import ReferenceProcess, log_errors
from aftserve.server import load
from aftserve.settings import Settings

BOUND = TOLERANCES["fp32"].bound


@pytest.fixture(scope="module")
def address(
    bundle_folder: Path, checkpoint_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    log = tmp_path_factory.mktemp("parity") / "log"
    with serving(bundle_folder, log, "--reference", str(checkpoint_file)) as (address, _):
        yield address


def compare(address: str, **document: object) -> httpx.Response:
    return http.post(f"{address}/parity", json=document, timeout=120)


def post(address: str, ids: list[int]) -> httpx.Response:
    return http.post(f"{address}/infer", json={"input_ids": [ids]}, timeout=60)


def wait_until_unready(address: str) -> None:
    eventually(lambda: http.get(f"{address}/readyz").status_code == 503, "the server is unready")


def reference_of(server_id: int) -> int | None:
    """Return the process of a server's PyTorch reference; None if none runs."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            status = (entry / "status").read_text()
        except OSError:
            continue
        if b"aftserve.parity.reference_worker" in words and f"PPid:\t{server_id}\n" in status:
            return int(entry.name)
    return None


def test_reference_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def log(written: bytes) -> None:
        errors = asyncio.StreamReader()
        errors.feed_data(written)
        errors.feed_eof()
        await log_errors(errors)

    asyncio.run(log(b"Traceback\n  \xff\n" + b"a" * 10_000 + b"\nend"))
    lines = [record.getMessage().removeprefix("reference: ") for record in caplog.records]
    assert lines[:2] == ["Traceback", "  \ufffd"]
    assert "".join(lines[2:-1]) == "a" * 10_000
    assert lines[-1] == "end"


def test_golden_cases_run_before_first_request(address: str) -> None:
    report = http.get(f"{address}/parity").json()
    assert report["within"]
    assert {case["subject"] for case in report["golden"]} >= {"model", "AftSimple"}
    assert all(case["passed"] and case["error"] <= case["bound"] for case in report["golden"])


@pytest.mark.parametrize("document", [{"text": "An invoice."}, {"input_ids": [5, 6, 299]}])
def test_document_is_compared_with_pytorch(document: dict[str, object], address: str) -> None:
    answer = compare(address, **document)
    assert answer.status_code == 200, answer.text
    check = answer.json()
    assert check["within"]
    assert check["error"] <= check["bound"] == BOUND
    assert [output["label"] for output in check["outputs"]] == ["invoice", "contract", "letter"]
    for output in check["outputs"]:
        assert output["difference"] == abs(output["served"] - output["reference"])
        # The reference computes in float64; a copy of the engine's output would be float32.
        assert output["served"] == float(np.float32(output["served"]))
        assert output["reference"] != float(np.float32(output["reference"]))


@pytest.mark.parametrize(
    "document", [{}, {"text": "a", "input_ids": [1]}, {"texts": ["a"]}, {"input_ids": []}]
)
def test_malformed_comparison_is_refused(document: dict[str, object], address: str) -> None:
    assert compare(address, **document).status_code == 422


def test_comparison_without_reference_is_refused(client: httpx.Client) -> None:
    answer = client.post("/parity", json={"text": "a"})
    assert answer.status_code == 404
    assert "--reference" in answer.json()["detail"]


def test_missing_reference_file_is_refused(bundle_folder: Path, tmp_path: Path) -> None:
    settings = Settings.read([str(bundle_folder), "--reference", str(tmp_path / "none.pt")])
    with pytest.raises(UsageError, match=r"none\.pt"):
        load(settings, Console(quiet=True))


def test_killed_reference_restarts_without_failed_requests(
    bundle_folder: Path, checkpoint_file: Path, tmp_path: Path
) -> None:
    options = ("--reference", str(checkpoint_file))
    with serving(bundle_folder, tmp_path / "log", *options) as (address, process):
        assert compare(address, text="a").status_code == 200
        number = reference_of(process.pid)
        assert number is not None
        with ThreadPoolExecutor(4) as pool:
            requests = [pool.submit(post, address, [5] * 1000) for _ in range(50)]
            os.kill(number, signal.SIGKILL)
            assert {answer.result().status_code for answer in requests} == {200}
        eventually(lambda: reference_of(process.pid) is None, "the reference has ended")
        assert compare(address, text="a").status_code == 200
        assert reference_of(process.pid) not in (None, number)
        last = reference_of(process.pid)
    eventually(lambda: not Path(f"/proc/{last}").exists(), "the reference ends with the server")


def test_reference_supports_many_classes(tmp_path: Path) -> None:
    labels = [str(number) for number in range(5000)]
    model = DocumentClassifier(
        ClassifierConfig(**tiny_models.CONFIG | {"num_labels": len(labels)})
    ).eval()
    aftexport.save(tmp_path / "model.pt", model=model, labels=labels)
    export(tmp_path / "model.pt", to="onnx", out=tmp_path / "model.bundle")
    bundle = Bundle.open(tmp_path / "model.bundle")
    ids = np.arange(100)

    async def ask() -> NDArray[np.float64]:
        settings = Settings(bundles=[bundle.path], reference=tmp_path / "model.pt")
        reference = ReferenceProcess(bundle, settings)
        try:
            return (await reference.outputs(ids))["logits"]
        finally:
            await reference.close()

    with torch.no_grad():
        expected = model.double()(torch.tensor(ids)[None], torch.tensor([len(ids)]))[0]
    np.testing.assert_allclose(asyncio.run(ask()), expected, rtol=1e-9, atol=1e-12)


def test_reference_of_other_model_is_refused(
    bundle_folder: Path, checkpoint_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "model.pt"
    other.write_bytes(checkpoint_file.read_bytes() + b"\0")
    with serving(bundle_folder, tmp_path / "log", "--reference", str(other)) as (address, _):
        answer = compare(address, text="a")
        assert answer.status_code == 503
        assert "not the file" in answer.json()["detail"]
        assert str(tmp_path) not in answer.json()["detail"]
        assert post(address, [5]).status_code == 200


def test_live_breach_makes_server_unready(
    bundle_copy: Path, checkpoint_file: Path, tmp_path: Path
) -> None:
    options = ("--reference", str(checkpoint_file), "--shadow", "1")
    with serving(odd_first_token(bundle_copy), tmp_path / "log", *options) as (address, _):
        within = {"kind": "reference", "verdict": "within"}
        assert post(address, [5, 6]).status_code == 200
        eventually(
            lambda: metric(address, "aftserve_parity_checks_total", **within) == 1,
            "the document is compared",
        )
        assert http.get(f"{address}/readyz").status_code == 200
        assert post(address, [5] * 65_537).status_code == 200
        assert metric(address, "aftserve_skipped_parity_checks_total") == 1
        assert post(address, [ODD, 6]).status_code == 200
        wait_until_unready(address)
        assert "PyTorch" in http.get(f"{address}/readyz").json()["status"]
        assert post(address, [5]).status_code == 503


def test_shared_run_is_compared_with_single(bundle_copy: Path, tmp_path: Path) -> None:
    options, ids = ("--shadow", "1", "--threads", "1"), [[7] * 100_000, *[[5] * 16] * 16]
    bundle = large_batches(bundle_copy)
    with serving(bundle, tmp_path / "log", *options, measured=True) as (address, _):
        http.post(f"{address}/infer", json={"input_ids": ids}, timeout=60)
        wait_until_unready(address)
        assert "single run" in http.get(f"{address}/readyz").json()["status"]
        assert metric(address, "aftserve_parity_checks_total", kind="batch", verdict="outside") >= 1


def test_golden_breach_makes_server_unready(
    bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = rounding_bundle(bundle_copy, monkeypatch)
    with serving(bundle, tmp_path / "log") as (address, _):
        assert not http.get(f"{address}/parity").json()["within"]
        assert http.get(f"{address}/readyz").status_code == 503
        assert "golden" in http.get(f"{address}/readyz").json()["status"]
        assert post(address, [5]).status_code == 503
        assert http.get(f"{address}/healthz").status_code == 200


def test_golden_breach_falls_back_if_configured(
    bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = rounding_bundle(bundle_copy, monkeypatch)
    with serving(bundle, tmp_path / "log", "--on-breach", "fallback") as (address, _):
        assert http.get(f"{address}/parity").json()["within"]
        assert http.get(f"{address}/info").json()["safe"]
        assert post(address, [5]).status_code == 200


def test_live_breach_falls_back_if_configured(
    bundle_copy: Path, checkpoint_file: Path, tmp_path: Path
) -> None:
    bundle = odd_first_token(bundle_copy)
    options = ("--reference", str(checkpoint_file), "--shadow", "1", "--on-breach", "fallback")
    with serving(bundle, tmp_path / "log", *options) as (address, _):
        assert post(address, [ODD, 6]).status_code == 200
        eventually(lambda: http.get(f"{address}/info").json()["safe"], "the server falls back")
        assert post(address, [5]).status_code == 200
        # The portable bodies are wrong too, and no other fallback is left.
        assert post(address, [ODD, 6]).status_code == 200
        wait_until_unready(address)


def test_failed_fallback_makes_server_unready(
    bundle_copy: Path, checkpoint_file: Path, tmp_path: Path
) -> None:
    bundle = odd_first_token(bundle_copy)
    options = ("--reference", str(checkpoint_file), "--shadow", "1", "--on-breach", "fallback")
    with serving(bundle, tmp_path / "log", *options) as (address, _):
        assert compare(address, text="a").status_code == 200
        (bundle / "model.onnx").unlink()
        assert post(address, [ODD, 6]).status_code == 200
        wait_until_unready(address)
        assert post(address, [5]).status_code == 503


def rounding_bundle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a bundle whose fused kernels exceed the tolerance on this machine."""
    if aftplugins.library("onnxruntime") is None:
        pytest.skip("no fused kernels are built here")
    use_coarsest_method(monkeypatch)
    coarse_kernels(bundle)
    if all(result.passed for result in verify(Bundle.open(bundle))):
        pytest.skip("this processor has no int8 products: the kernels do not round")
    return bundle
