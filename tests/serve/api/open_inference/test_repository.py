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
from bundle_swaps import RepositoryServer, damage, deploy, serving_models, text_input
from clients import eventually, http
from tritonclient.utils import InferenceServerException

INDEX = "/v2/repository/index"
LOAD = "/v2/repository/models/a/load"
UNLOAD = "/v2/repository/models/a/unload"


@pytest.fixture
def protocol(repository: RepositoryServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(urlsplit(repository.server.http).netloc) as client:
        yield client


def post(
    repository: RepositoryServer, path: str, key: dict[str, str], **given: Any
) -> httpx.Response:
    return http.post(f"{repository.server.http}{path}", headers=key, **given)


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
    repository: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    ready = ("READY", "")
    before, other = (scores(protocol, name, repository.user) for name in ("a", "b"))
    assert states(protocol, repository.user) == {"a": ready, "b": ready}
    protocol.unload_model("a", headers=repository.admin)
    assert states(protocol, repository.user) == {"a": ("UNAVAILABLE", "unloaded"), "b": ready}
    listed = post(repository, INDEX, repository.user, json={"ready": True}).json()
    assert [one["name"] for one in listed] == ["b"]
    assert not protocol.is_model_ready("a", headers=repository.user)
    with pytest.raises(InferenceServerException, match="Expected the model 'b', got 'a'") as raised:
        scores(protocol, "a", repository.user)
    assert raised.value.status() == "404"
    assert scores(protocol, "b", repository.user) == other
    protocol.load_model("a", headers=repository.admin)
    assert states(protocol, repository.user) == {"a": ready, "b": ready}
    assert protocol.is_model_ready("a", headers=repository.user)
    assert scores(protocol, "a", repository.user) == before


def test_load_takes_replaced_bundle_and_refuses_broken(
    repository: RepositoryServer,
    protocol: triton.InferenceServerClient,
    bundle_folder: Path,
    other_bundle: Path,
) -> None:
    place = repository.folder / "a.bundle"
    before, other = (scores(protocol, name, repository.user) for name in ("a", "b"))
    assert before != other
    deploy(other_bundle, place)
    protocol.load_model("a", headers=repository.admin)
    assert scores(protocol, "a", repository.user) == other
    damage(place)
    with pytest.raises(InferenceServerException, match=r"model\.onnx was changed") as raised:
        protocol.load_model("a", headers=repository.admin)
    assert raised.value.status() == "409"
    assert str(repository.folder) not in str(raised.value)
    assert scores(protocol, "a", repository.user) == other
    deploy(bundle_folder, place)
    protocol.load_model("a", headers=repository.admin)
    assert scores(protocol, "a", repository.user) == before


def test_unload_answers_accepted_requests(
    repository: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    """Every request is answered in full, or refused because the model is unknown."""
    body = {"texts": ["long " * 300] * 20}
    expected = post(repository, "/models/a/infer", repository.user, json=body).json()["results"]
    counts = {200: 0, 404: 0}
    stopping = threading.Event()

    def client() -> None:
        while not stopping.is_set():
            answer = post(repository, "/models/a/infer", repository.user, json=body)
            if answer.status_code == 200:
                for one, wanted in zip(answer.json()["results"], expected, strict=True):
                    assert one["scores"] == pytest.approx(wanted["scores"], abs=1e-5)
            counts[answer.status_code] += 1

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        try:
            eventually(lambda: counts[200], "the model answers")
            protocol.unload_model("a", headers=repository.admin)
            eventually(lambda: counts[404], "the model is unknown")
        finally:
            stopping.set()
        for one in clients:
            one.result()
    protocol.load_model("a", headers=repository.admin)


def series(repository: RepositoryServer, name: str) -> dict[str, float]:
    """Return the series of a model by their lines in the text format, without the values."""
    text = http.get(f"{repository.server.http}/metrics", headers=repository.user).text
    lines = [line.rpartition(" ") for line in text.splitlines() if f'model="{name}"' in line]
    return {line: float(value) for line, _, value in lines}


def test_unload_answers_lines_to_come(
    repository: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    """The client sends its second line during the unload; the first is answered before."""
    runs = 'aftserve_run_documents_sum{model="a"}'

    with ThreadPoolExecutor(1) as pool:
        unloads = []

        def lines() -> Iterator[bytes]:
            before = series(repository, "a")[runs]
            yield b'{"text": "one"}\n'
            eventually(lambda: series(repository, "a")[runs] > before, "the first line is answered")
            unloads.append(pool.submit(post, repository, UNLOAD, repository.admin))
            unloaded = lambda: states(protocol, repository.user)["a"][0]  # noqa: E731
            eventually(lambda: unloaded() != "READY", "the unload begins")
            for _ in range(20):
                assert unloaded() == "UNLOADING"
            assert not unloads[0].done()
            yield b'{"text": "two"}\n'

        headers = {**repository.user, "content-type": "application/x-ndjson"}
        answer = post(repository, "/models/a/infer", headers, content=lines())
        assert unloads[0].result().status_code == 200
    assert [json.loads(line).keys() >= {"scores"} for line in answer.iter_lines()] == [True, True]
    assert states(protocol, repository.user)["a"] == ("UNAVAILABLE", "unloaded")
    assert series(repository, "a") == {}
    protocol.load_model("a", headers=repository.admin)


@pytest.mark.slow
def test_stop_during_unload_answers_lines(
    bundle_folder: Path, other_bundle: Path, tmp_path: Path
) -> None:
    """The unload is refused, the accepted request is answered, and the process ends."""
    with (
        serving_models(bundle_folder, other_bundle, tmp_path) as repository,
        triton.InferenceServerClient(urlsplit(repository.server.http).netloc) as protocol,
        ThreadPoolExecutor(1) as pool,
    ):
        unloads = []

        def lines() -> Iterator[bytes]:
            yield b'{"text": "one"}\n'
            runs = 'aftserve_run_documents_sum{model="a"}'
            eventually(lambda: series(repository, "a")[runs] > 0, "the first line is answered")
            unloads.append(pool.submit(post, repository, UNLOAD, repository.admin))
            unloading = lambda: states(protocol, repository.user)["a"][0] == "UNLOADING"  # noqa: E731
            eventually(unloading, "the unload begins")
            repository.server.process.terminate()
            assert unloads[0].result().status_code == 503
            yield b'{"text": "two"}\n'

        headers = {**repository.user, "content-type": "application/x-ndjson"}
        answer = post(repository, "/models/a/infer", headers, content=lines())
        assert [json.loads(one).keys() >= {"scores"} for one in answer.iter_lines()] == [True, True]
        assert repository.server.process.wait(60) == 0


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_change_needs_admin_key(path: str, repository: RepositoryServer) -> None:
    assert post(repository, path, {}).status_code == 401
    refused = post(repository, path, repository.user)
    assert refused.status_code == 403
    assert "--admin" in refused.json()["error"]
    assert post(repository, INDEX, {}).status_code == 401


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
    path: str, body: Any, status: int, message: str, repository: RepositoryServer
) -> None:
    refused = post(repository, path, repository.admin, json=body)
    assert refused.status_code == status
    assert message in refused.json()["error"]


def test_triton_parameters_are_refused(
    repository: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException, match="got 'config'"):
        protocol.load_model("a", headers=repository.admin, config="{}")
    with pytest.raises(InferenceServerException, match="no model depends on another"):
        protocol.unload_model("a", headers=repository.admin, unload_dependents=True)


def test_path_of_model_has_only_that_model(repository: RepositoryServer) -> None:
    below = "/models/a"
    assert post(repository, f"{below}{UNLOAD}", repository.admin).status_code == 200
    listed = post(repository, f"{below}{INDEX}", repository.user).json()
    assert [(one["name"], one["state"]) for one in listed] == [("a", "UNAVAILABLE")]
    assert post(repository, f"{below}{LOAD}", repository.admin).status_code == 200
    for change in ("load", "unload"):
        refused = post(repository, f"{below}/v2/repository/models/b/{change}", repository.admin)
        assert refused.status_code == 404
        assert "Expected the model 'a', got 'b'" in refused.json()["error"]
    unknown = post(repository, f"/models/c{INDEX}", repository.user)
    assert unknown.status_code == 404
    assert "one of the models 'a', 'b', got 'c'" in unknown.json()["error"]
