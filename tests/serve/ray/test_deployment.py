"""The server as a Ray Serve deployment: replicas, options, and refused configurations."""

import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from altered_bundles import always
from clients import eventually, http
from commands import Outcome, assert_refused, environment, run_python, without
from load.documents import Document, bare_engine, make_documents
from ray_cluster import kill, processes
from servers import free_port

from aftexport.system.installation import install_command
from aftserve.cli import main
from aftserve.client import Client

REPLICA = r"^ray::ServeReplica"
CONFIG = """
port = {port}
threads = 1

[ray]
health_check_period_s = 1

[ray.autoscaling_config]
min_replicas = 2
max_replicas = 3
target_ongoing_requests = 500
"""
_OPTIONS = """
import json, ray
from ray.serve.context import _get_global_client
ray.init(configure_logging=False, log_to_driver=False)
details = _get_global_client().get_serve_details()
print(json.dumps(details["applications"]["aftserve"]["deployments"]["aftserve"]["deployment_config"]))
"""


@pytest.fixture(scope="module")
def place() -> str:
    return f"127.0.0.1:{free_port()}"


def replicas(ray: dict[str, str]) -> list[int]:
    return processes(f"RAY_AUTH_TOKEN={ray['RAY_AUTH_TOKEN']}", REPLICA)


def deploy(ray: dict[str, str], bundle: Path, folder: Path, config: str) -> Outcome:
    (folder / "ray.toml").write_text(config)
    words = ("deploy", bundle, "--engine", "ray", "--config", "ray.toml")
    return run_python("-m", "aftserve", *words, cwd=folder, **ray)


@pytest.fixture(scope="module")
def address(
    ray: dict[str, str], place: str, bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    folder = tmp_path_factory.mktemp("deployed")
    config = CONFIG.format(port=place.split(":")[1])
    outcome = deploy(ray, bundle_folder, folder, config)
    assert outcome.code == 0, outcome.err
    assert f"running on http://{place}" in outcome.out
    return f"http://{place}"


@pytest.fixture(scope="module")
def documents(bundle_folder: Path) -> list[Document]:
    return make_documents(bare_engine(bundle_folder, 1), 60, shortest=64, longest=16_384)


def test_deployment_has_the_servers_routes(address: str, bundle_folder: Path) -> None:
    assert http.get(f"{address}/readyz").json() == {"status": "ready"}
    assert http.get(f"{address}/parity").json()["within"]
    assert http.get(f"{address}/v2/models/model").json()["name"] == "model"
    lines = http.post(
        f"{address}/infer",
        content='{"text": "a"}\n{"text": ""}\n',
        headers={"Content-Type": "application/x-ndjson"},
    )
    assert "label" in lines.text.splitlines()[0]
    assert "no tokens" in lines.text.splitlines()[1]
    assert http.post(f"{address}/infer", json={"text": 1}).status_code == 422


def test_proxy_streams_answers(address: str) -> None:
    with Client(address) as client, client.stream("An invoice.") as answer:
        assert answer.result.label == client.infer("An invoice.").label
        assert list(answer) == []  # the heads have no answers for tokens
    lines = http.post(
        f"{address}/infer", json={"text": "a"}, headers={"Accept": "application/x-ndjson"}
    ).text.splitlines()
    assert [*map(json.loads, lines)][1:] == [{"complete": True, "lines": 1}]


def test_request_has_one_id(address: str) -> None:
    for path in ("/healthz", "/nothing"):
        answer = http.get(f"{address}{path}", headers={"X-Request-ID": "order-7"})
        assert answer.headers.get_list("x-request-id") == ["order-7"]
        (name,) = http.get(f"{address}{path}").headers.get_list("x-request-id")
        assert name


def test_config_options_reach_ray(address: str, ray: dict[str, str], tmp_path: Path) -> None:
    outcome = run_python("-c", _OPTIONS, cwd=tmp_path, **ray)
    assert outcome.code == 0, outcome.err
    for name, value in {
        "min_replicas": 2,
        "max_replicas": 3,
        "target_ongoing_requests": 500.0,
        "health_check_period_s": 1.0,
        "max_ongoing_requests": 1024,
        "graceful_shutdown_timeout_s": 60.0,
        "num_cpus": 1,
    }.items():
        assert re.search(rf'"{name}": {value}\b', outcome.out), (name, outcome.out)


def test_killed_replica_loses_no_document(
    address: str, ray: dict[str, str], documents: list[Document]
) -> None:
    before = replicas(ray)
    assert len(before) == 2
    requests = documents * 10
    random.Random(0).shuffle(requests)
    answered, third_answered = [], threading.Event()

    def ask(document: Document) -> bool:
        scores = client.infer(document.text).scores
        answered.append(document)
        if len(answered) > len(requests) // 3:
            third_answered.set()
        return document.is_answered_by(dict(scores))

    def kill_one() -> None:
        assert third_answered.wait(300)
        kill(before[0])

    with Client(address) as client, ThreadPoolExecutor(8) as pool:
        killing = threading.Thread(target=kill_one)
        killing.start()
        right = list(pool.map(ask, requests))
        killing.join()
    assert right == [True] * len(requests)
    eventually(lambda: len(set(replicas(ray)) - {before[0]}) == 2, "another replica starts")


def test_redeployment_with_short_queue_sends_429(
    address: str, ray: dict[str, str], bundle_folder: Path, place: str, tmp_path: Path
) -> None:
    before = replicas(ray)
    config = f"port = {place.split(':')[1]}\nthreads = 1\nmax_queue_seconds = 0\n"
    outcome = deploy(ray, bundle_folder, tmp_path, config)
    assert outcome.code == 0, outcome.err
    eventually(lambda: not set(before) & set(replicas(ray)), "the earlier replicas end")
    assert len(replicas(ray)) == 1
    long = "long " * 100_000

    def ask(_: int) -> httpx.Response:
        return http.post(f"{address}/infer", json={"text": long}, timeout=60)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["Retry-After"]) >= 1
    assert "take" in refused.json()["detail"]


def test_bundle_outside_tolerance_is_never_ready(
    ray: dict[str, str], bundle_copy: Path, tmp_path: Path
) -> None:
    config = "threads = 1\n[ray]\nmax_constructor_retry_count = 1\n"
    outcome = deploy(ray, always(bundle_copy), tmp_path, config)
    assert outcome.code == 2, outcome.err
    assert "golden" in outcome.err
    assert "error: Ray Serve cannot deploy the bundle" in outcome.err


@pytest.mark.filterwarnings(  # the import of Ray Serve
    "ignore:Using extra keyword arguments on `Field`:DeprecationWarning:ray"
)
@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("[ray]\nnum_replica = 2", "no option num_replica"),
        ('[ray]\nnum_replicas = "many"', "num_replicas"),
        ("[ray]\nnum_replicas = 0", "num_replicas"),
        ("[ray.autoscaling_config]\nmin_replica = 2", "no option autoscaling_config.min_replica"),
        ("[ray.autoscaling_config]\nmin_replicas = 3\nmax_replicas = 1", "max_replicas"),
        ("[ray]\nautoscaling_config = 3", "autoscaling_config"),
        ("[ray.ray_actor_options]\nnum_cpu = 1", "num_cpu"),
        ("[ray]\nray_actor_options = 3", "ray_actor_options"),
        ('[ray]\nname = "other"', "no option name"),
        ("ray = 3", "ray"),
        ("threads = 0", "--threads"),
        ("color = 1", "color"),
        ("[ray", "ray.toml"),
    ],
)
def test_bad_config_is_refused(
    section: str, message: str, bundle_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # an address that must not be used
    path = tmp_path / "ray.toml"
    path.write_text(section)
    code = main(["deploy", str(bundle_folder), "--engine", "ray", "--config", str(path)])
    captured = capsys.readouterr()
    assert_refused(Outcome(code, captured.out, captured.err), message)


def test_bad_bundle_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["deploy", str(tmp_path / "absent"), "--engine", "ray"]) == 2
    assert "absent" in capsys.readouterr().err


def test_missing_ray_names_the_extra(bundle_folder: Path, tmp_path: Path) -> None:
    words = ("deploy", bundle_folder, "--engine", "ray")
    outcome = without(["ray"], "aftserve", *words, cwd=tmp_path)
    assert_refused(outcome, "needs ray", install_command("ray"))


def test_own_ray_ends_with_deployment(bundle_folder: Path, tmp_path: Path) -> None:
    place, log, mark = f"127.0.0.1:{free_port()}", tmp_path / "log", f"AFT_TEST={uuid.uuid4().hex}"
    (tmp_path / "ray.toml").write_text(f"port = {place.split(':')[1]}\nthreads = 1\n")
    words = ["-m", "aftserve", "deploy", str(bundle_folder), "--engine", "ray"]
    # In tmp_path, the paths of Ray's sockets would be too long.
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as file:
        variables = environment(TMPDIR=folder, AFT_TEST=mark.split("=")[1])
        process = subprocess.Popen(
            [sys.executable, *words, "--config", "ray.toml"],
            cwd=tmp_path, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
        try:
            eventually(
                lambda: "running on" in log.read_text("utf-8") or process.poll() is not None,
                "the deployment runs",
            )
            assert processes(mark, REPLICA) != []
            answer = http.post(f"http://{place}/infer", json={"text": "a"}, timeout=30)
            assert answer.status_code == 200
        finally:
            process.terminate()
            process.wait(60)
        assert process.returncode == 0, log.read_text("utf-8")
        eventually(lambda: processes(mark) == [], "all its processes end")
        assert list(Path(folder).glob("aftserve-*")) == []
    with pytest.raises(httpx.ConnectError):
        http.get(f"http://{place}/healthz")


@pytest.mark.parametrize(
    "words",
    [["--uds", "x"], ["--grpc-port", "1"], ["--ssl-certfile", "x"], ["--host", "127.0.0.1,::1"]],
)
def test_address_that_ray_lacks_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "absent", "--engine", "ray", *words]) == 2
    assert words[0] in capsys.readouterr().err
