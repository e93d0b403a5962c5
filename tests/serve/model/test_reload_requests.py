"""``POST /reload``: its permissions, concurrent requests, and a stop of the server."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from bundle_swaps import damage, deploy, digest
from clients import eventually, http
from servers import serving

from aftserve.api.api_keys import make_key


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
