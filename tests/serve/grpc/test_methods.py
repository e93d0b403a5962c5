"""The extension for model repositories: Triton's own gRPC client, unmodified, and raw calls."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from bundle_swaps import RepositoryServer, damage, deploy, text_input
from clients import eventually, http
from grpc_servers import method, serving_grpc
from tritonclient.utils import InferenceServerException

from aftserve.api.api_keys import make_key
from aftserve.grpc.wire_types import MESSAGES


@pytest.fixture
def protocol(repository: RepositoryServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(repository.server.grpc) as client:
        yield client


def scores(protocol: triton.InferenceServerClient, name: str, key: dict[str, str]) -> bytes:
    result = protocol.infer(name, [text_input(triton)], headers=key)
    return bytes(result.as_numpy("scores").tobytes())


def states(protocol: triton.InferenceServerClient, key: dict[str, str]) -> dict[str, Any]:
    models = protocol.get_model_repository_index(headers=key).models
    assert {one.version for one in models} == {"1"}
    return {one.name: (one.state, one.reason) for one in models}


def refused(work: Any, code: str, message: str) -> None:
    with pytest.raises(InferenceServerException, match=message) as raised:
        work()
    assert raised.value.status() == f"StatusCode.{code}"


def test_metadata_names_extension(protocol: triton.InferenceServerClient) -> None:
    assert list(protocol.get_server_metadata().extensions) == ["model_repository"]


def test_unloaded_model_is_unknown_until_load(
    repository: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    admin, user, ready = repository.admin, repository.user, ("READY", "")
    before = scores(protocol, "a", user)
    protocol.unload_model("a", headers=admin)
    assert states(protocol, user) == {"a": ("UNAVAILABLE", "unloaded"), "b": ready}
    assert not protocol.is_model_ready("a", headers=user)
    assert not protocol.is_model_ready("unknown", headers=user)
    assert not protocol.is_model_ready("b", "2", headers=user)
    assert protocol.is_model_ready("b", headers=user)
    request = MESSAGES["RepositoryIndexRequest"](ready=True)
    with grpc.insecure_channel(repository.server.grpc) as channel:
        listed = method(channel, "RepositoryIndex")(request, metadata=[*user.items()])
    assert [one.name for one in listed.models] == ["b"]
    refused(lambda: scores(protocol, "a", user), "NOT_FOUND", "the model 'b', got 'a'")
    protocol.unload_model("b", headers=admin)
    refused(lambda: scores(protocol, "a", user), "NOT_FOUND", "no model is loaded")
    protocol.load_model("b", headers=admin)
    protocol.load_model("a", headers=admin)
    assert states(protocol, user) == {"a": ready, "b": ready}
    assert scores(protocol, "a", user) == before


def test_load_takes_replaced_bundle_and_refuses_broken(
    repository: RepositoryServer,
    protocol: triton.InferenceServerClient,
    bundle_folder: Path,
    other_bundle: Path,
) -> None:
    place, admin = repository.folder / "a.bundle", repository.admin
    before, other = (scores(protocol, name, repository.user) for name in ("a", "b"))
    assert before != other
    deploy(other_bundle, place)
    protocol.load_model("a", headers=admin)
    assert scores(protocol, "a", repository.user) == other
    damage(place)
    broken = r"model\.onnx was changed"
    refused(lambda: protocol.load_model("a", headers=admin), "FAILED_PRECONDITION", broken)
    assert scores(protocol, "a", repository.user) == other
    deploy(bundle_folder, place)
    protocol.load_model("a", headers=admin)
    assert scores(protocol, "a", repository.user) == before


def test_unload_answers_accepted_calls(
    repository: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    """Every call is answered in full, or refused because the model is unknown."""
    expected = scores(protocol, "a", repository.user)
    answered, unknown = list[bytes](), list[Any]()

    def collect(result: Any, error: Any) -> None:
        if error is None:
            answered.append(bytes(result.as_numpy("scores").tobytes()))
        else:
            unknown.append(error)

    calls = 40
    for _ in range(calls):
        tensor = text_input(triton)
        protocol.async_infer("a", [tensor], callback=collect, headers=repository.user)
    eventually(lambda: answered, "the model answers")
    protocol.unload_model("a", headers=repository.admin)
    eventually(lambda: len(answered) + len(unknown) == calls, "all calls end")
    for one in answered:
        values, wanted = np.frombuffer(one, np.float32), np.frombuffer(expected, np.float32)
        np.testing.assert_allclose(values, wanted, atol=1e-5)
    assert {one.status() for one in unknown} <= {"StatusCode.NOT_FOUND"}
    metrics = http.get(f"{repository.server.http}/metrics", headers=repository.user).text
    assert 'model="a"' not in metrics
    protocol.load_model("a", headers=repository.admin)
    assert scores(protocol, "a", repository.user) == expected


def test_change_needs_admin_key(
    repository: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    for change in (protocol.load_model, protocol.unload_model):
        refused(lambda: change("a"), "UNAUTHENTICATED", "valid API key")  # noqa: B023
        refused(lambda: change("a", headers=repository.user), "PERMISSION_DENIED", "--admin")  # noqa: B023
    refused(protocol.get_model_repository_index, "UNAUTHENTICATED", "valid API key")


def test_server_without_keys_only_lists(bundle_folder: Path, tmp_path: Path) -> None:
    with (
        serving_grpc(bundle_folder, tmp_path / "log") as server,
        triton.InferenceServerClient(server.grpc) as protocol,
    ):
        assert states(protocol, {}) == {"model": ("READY", "")}
        for change in (protocol.load_model, protocol.unload_model):
            refused(lambda: change("model"), "UNIMPLEMENTED", "not found")  # noqa: B023


@pytest.mark.slow
def test_load_outlasts_deadline_of_server(bundle_folder: Path, tmp_path: Path) -> None:
    key, section = make_key("admin", None, admin=True)
    (tmp_path / "keys").write_text(section)
    options = ("--api-keys", str(tmp_path / "keys"), "--deadline-seconds", "0.001")
    with (
        serving_grpc(bundle_folder, tmp_path / "log", *options) as server,
        triton.InferenceServerClient(server.grpc) as protocol,
    ):
        refused(
            lambda: scores(protocol, "model", {"x-api-key": key}), "DEADLINE_EXCEEDED", "deadline"
        )
        protocol.load_model("model", headers={"x-api-key": key})


def test_refusal_names_expectation(
    repository: RepositoryServer, protocol: triton.InferenceServerClient
) -> None:
    admin = repository.admin

    def load(name: str = "a", **given: Any) -> Any:
        return lambda: protocol.load_model(name, headers=admin, **given)

    refused(load(config="{}"), "INVALID_ARGUMENT", "no parameter of a load, got 'config'")
    files = {"file:1/model.onnx": b"\0"}
    refused(load(files=files), "INVALID_ARGUMENT", "got 'file:1/model.onnx'")
    refused(load("c"), "NOT_FOUND", "'a' or 'b', got 'c'")
    dependents = {"headers": admin, "unload_dependents": True}
    work = lambda: protocol.unload_model("a", **dependents)  # noqa: E731
    refused(work, "INVALID_ARGUMENT", "no model depends on another")
    assert states(protocol, admin)["a"] == ("READY", "")


@pytest.mark.parametrize("name", ["RepositoryIndex", "RepositoryModelLoad"])
def test_name_of_repository_is_refused(name: str, repository: RepositoryServer) -> None:
    request = MESSAGES[f"{name}Request"](repository_name="other")
    with (
        grpc.insecure_channel(repository.server.grpc) as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        method(channel, name)(request, metadata=[*repository.admin.items()])
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Expected no repository_name, got 'other'" in raised.value.details()
