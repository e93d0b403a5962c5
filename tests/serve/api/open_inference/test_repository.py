"""The extension for model repositories: Triton's own HTTP client, unmodified, and raw requests."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import tritonclient.http as triton
from bundle_swaps import damage, deploy
from clients import eventually, http
from repository_servers import RepositoryServer, serving_models, text_input
from tritonclient.utils import InferenceServerException

INDEX = "/v2/repository/index"
LOAD = "/v2/repository/models/a/load"
UNLOAD = "/v2/repository/models/a/unload"


@pytest.fixture(scope="module")
def served(
    bundle_folder: Path, other_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RepositoryServer]:
    folder = tmp_path_factory.mktemp("repository")
    with serving_models(bundle_folder, other_bundle, folder) as served:
        yield served
        assert "Traceback" not in (folder / "log").read_text("utf-8")


@pytest.fixture
def protocol(served: RepositoryServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(urlsplit(served.server.http).netloc) as client:
        yield client


def post(served: RepositoryServer, path: str, key: dict[str, str], **given: Any) -> httpx.Response:
    return http.post(f"{served.server.http}{path}", headers=key, **given)


def scores(protocol: triton.InferenceServerClient, name: str, key: dict[str, str]) -> bytes:
    result = protocol.infer(name, [text_input(triton)], headers=key)
    return bytes(result.as_numpy("scores").tobytes())


def states(protocol: triton.InferenceServerClient, key: dict[str, str]) -> dict[str, Any]:
    found = protocol.get_model_repository_index(headers=key)
    assert {one["version"] for one in found} == {"1"}
    return {one["name"]: (one["state"], one["reason"]) for one in found}


def test_metadata_names_extension(protocol: triton.InferenceServerClient) -> None:
    assert "model_repository" in protocol.get_server_metadata()["extensions"]


def test_unloaded_model_is_unknown_until_load(
    served: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    ready = ("READY", "")
    before, other = (scores(protocol, name, served.user) for name in ("a", "b"))
    assert states(protocol, served.user) == {"a": ready, "b": ready}
    protocol.unload_model("a", headers=served.admin)
    assert states(protocol, served.user) == {"a": ("UNAVAILABLE", "unloaded"), "b": ready}
    listed = post(served, INDEX, served.user, json={"ready": True}).json()
    assert [one["name"] for one in listed] == ["b"]
    assert not protocol.is_model_ready("a", headers=served.user)
    with pytest.raises(InferenceServerException, match="Expected the model 'b', got 'a'") as raised:
        scores(protocol, "a", served.user)
    assert raised.value.status() == "404"
    assert scores(protocol, "b", served.user) == other
    protocol.load_model("a", headers=served.admin)
    assert states(protocol, served.user) == {"a": ready, "b": ready}
    assert protocol.is_model_ready("a", headers=served.user)
    assert scores(protocol, "a", served.user) == before


def test_load_takes_replaced_bundle_and_refuses_broken(
    served: RepositoryServer,
    protocol: triton.InferenceServerClient,
    bundle_folder: Path,
    other_bundle: Path,
) -> None:
    place = served.folder / "a.bundle"
    before, other = (scores(protocol, name, served.user) for name in ("a", "b"))
    assert before != other
    deploy(other_bundle, place)
    protocol.load_model("a", headers=served.admin)
    assert scores(protocol, "a", served.user) == other
    damage(place)
    with pytest.raises(InferenceServerException, match=r"model\.onnx was changed") as raised:
        protocol.load_model("a", headers=served.admin)
    assert raised.value.status() == "409"
    assert str(served.folder) not in str(raised.value)
    assert scores(protocol, "a", served.user) == other
    deploy(bundle_folder, place)
    protocol.load_model("a", headers=served.admin)
    assert scores(protocol, "a", served.user) == before


def test_unload_answers_accepted_requests(
    served: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    """Every request is answered in full, or refused because the model is unknown."""
    body = {"texts": ["long " * 300] * 20}
    expected = post(served, "/models/a/infer", served.user, json=body).json()["results"]
    counts = {200: 0, 404: 0}
    stopping = threading.Event()

    def client() -> None:
        while not stopping.is_set():
            answer = post(served, "/models/a/infer", served.user, json=body)
            if answer.status_code == 200:
                for one, wanted in zip(answer.json()["results"], expected, strict=True):
                    assert one["scores"] == pytest.approx(wanted["scores"], abs=1e-5)
            counts[answer.status_code] += 1

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        try:
            eventually(lambda: counts[200], "the model answers")
            protocol.unload_model("a", headers=served.admin)
            eventually(lambda: counts[404], "the model is unknown")
        finally:
            stopping.set()
        for one in clients:
            one.result()
    protocol.load_model("a", headers=served.admin)


def series(served: RepositoryServer, name: str) -> dict[str, float]:
    """Return the series of a model by their lines in the text format, without the values."""
    text = http.get(f"{served.server.http}/metrics", headers=served.user).text
    lines = [line.rpartition(" ") for line in text.splitlines() if f'model="{name}"' in line]
    return {line: float(value) for line, _, value in lines}


def test_unload_answers_lines_to_come(
    served: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    """The client sends its second line during the unload; the first is answered before."""
    runs = 'aftserve_run_documents_sum{model="a"}'

    with ThreadPoolExecutor(1) as pool:
        unloads = []

        def lines() -> Iterator[bytes]:
            before = series(served, "a")[runs]
            yield b'{"text": "one"}\n'
            eventually(lambda: series(served, "a")[runs] > before, "the first line is answered")
            unloads.append(pool.submit(post, served, UNLOAD, served.admin))
            unloaded = lambda: states(protocol, served.user)["a"][0]  # noqa: E731
            eventually(lambda: unloaded() != "READY", "the unload begins")
            for _ in range(20):
                assert unloaded() == "UNLOADING"
            assert not unloads[0].done()
            yield b'{"text": "two"}\n'

        headers = {**served.user, "content-type": "application/x-ndjson"}
        answer = post(served, "/models/a/infer", headers, content=lines())
        assert unloads[0].result().status_code == 200
    assert [json.loads(line).keys() >= {"scores"} for line in answer.iter_lines()] == [True, True]
    assert states(protocol, served.user)["a"] == ("UNAVAILABLE", "unloaded")
    assert series(served, "a") == {}
    protocol.load_model("a", headers=served.admin)


@pytest.mark.slow
def test_stop_during_unload_answers_lines(
    bundle_folder: Path, other_bundle: Path, tmp_path: Path
) -> None:
    """The unload is refused, the accepted request is answered, and the process ends."""
    with (
        serving_models(bundle_folder, other_bundle, tmp_path) as served,
        triton.InferenceServerClient(urlsplit(served.server.http).netloc) as protocol,
        ThreadPoolExecutor(1) as pool,
    ):
        unloads = []

        def lines() -> Iterator[bytes]:
            yield b'{"text": "one"}\n'
            runs = 'aftserve_run_documents_sum{model="a"}'
            eventually(lambda: series(served, "a")[runs] > 0, "the first line is answered")
            unloads.append(pool.submit(post, served, UNLOAD, served.admin))
            unloading = lambda: states(protocol, served.user)["a"][0] == "UNLOADING"  # noqa: E731
            eventually(unloading, "the unload begins")
            served.server.process.terminate()
            assert unloads[0].result().status_code == 503
            yield b'{"text": "two"}\n'

        headers = {**served.user, "content-type": "application/x-ndjson"}
        answer = post(served, "/models/a/infer", headers, content=lines())
        assert [json.loads(one).keys() >= {"scores"} for one in answer.iter_lines()] == [True, True]
        assert served.server.process.wait(60) == 0


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_change_needs_admin_key(path: str, served: RepositoryServer) -> None:
    assert post(served, path, {}).status_code == 401
    refused = post(served, path, served.user)
    assert refused.status_code == 403
    assert "--admin" in refused.json()["error"]
    assert post(served, INDEX, {}).status_code == 401


def test_server_without_keys_only_lists(server: str) -> None:
    answer = http.post(f"{server}{INDEX}")
    assert answer.json() == [{"name": "model", "version": "1", "state": "READY", "reason": ""}]
    assert http.post(f"{server}/v2/repository/models/model/load").status_code == 404
    paths = http.get(f"{server}/openapi.json").json()["paths"]
    assert [path for path in paths if "repository" in path] == [INDEX]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {"parameters": {"config": "{}"}}, 422, "no parameter of a load, got 'config'"),
        (LOAD, {"parameters": {"file:1/model.onnx": "AAAA"}}, 422, "got 'file:1/model.onnx'"),
        (LOAD, {"parameters": 1}, 422, "parameters: Input should be a valid dictionary"),
        (LOAD, {"path": "/a"}, 422, "Expected a known field, got 'path'"),
        (LOAD, [], 422, "The body must be a JSON object"),
        (UNLOAD, {"parameters": {"unload_dependents": True}}, 422, "no model depends on another"),
        (UNLOAD, {"parameters": {"unload_dependents": 0}}, 422, "which is false"),
        (UNLOAD, {"parameters": {"other": False}}, 422, "got 'other'"),
        (INDEX, {"ready": "yes"}, 422, "ready: Input should be a valid boolean"),
        ("/v2/repository/models/c/load", {}, 404, "'a' or 'b', got 'c'"),
        ("/v2/repository/models/..%2Fa/load", {}, 404, "Not Found"),
        ("/v2/repository/models/c/unload", {}, 404, "'a' or 'b', got 'c'"),
    ],
)
def test_refusal_names_expectation(
    path: str, body: Any, status: int, message: str, served: RepositoryServer
) -> None:
    refused = post(served, path, served.admin, json=body)
    assert refused.status_code == status
    assert message in refused.json()["error"]


def test_triton_parameters_are_refused(
    served: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException, match="got 'config'"):
        protocol.load_model("a", headers=served.admin, config="{}")
    with pytest.raises(InferenceServerException, match="no model depends on another"):
        protocol.unload_model("a", headers=served.admin, unload_dependents=True)


def test_path_of_model_has_only_that_model(served: RepositoryServer) -> None:
    below = "/models/a"
    assert post(served, f"{below}{UNLOAD}", served.admin).status_code == 200
    listed = post(served, f"{below}{INDEX}", served.user).json()
    assert [(one["name"], one["state"]) for one in listed] == [("a", "UNAVAILABLE")]
    assert post(served, f"{below}{LOAD}", served.admin).status_code == 200
    for change in ("load", "unload"):
        refused = post(served, f"{below}/v2/repository/models/b/{change}", served.admin)
        assert refused.status_code == 404
        assert "Expected the model 'a', got 'b'" in refused.json()["error"]
    unknown = post(served, f"/models/c{INDEX}", served.user)
    assert unknown.status_code == 404
    assert "one of the models 'a', 'b', got 'c'" in unknown.json()["error"]
