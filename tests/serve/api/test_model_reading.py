"""A reload to a model with other outputs, between the reading of a request and its answer."""

import asyncio
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tiny_models
from bundle_swaps import deploy, load_models

from aftexport.pipeline.export import export
from aftserve.api.model_choice import read_and_answer
from aftserve.app import create_app
from aftserve.errors import UnavailableError
from aftserve.grpc.call import Call
from aftserve.grpc.methods import Methods
from aftserve.grpc.wire_types import MESSAGES
from aftserve.serving.repository import ModelRepository
from aftserve.serving.service import Service

LABELS = ("first", "second")
OLD_CHOICES = [{"value": label} for label in tiny_models.LABELS]
NEW_CHOICES = [{"value": label} for label in LABELS]
MODEL = "served"


@pytest.fixture(scope="module")
def new_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose output has another name and other labels than that of the first bundle."""
    folder = tmp_path_factory.mktemp("new")
    heads = {"kind": {"task": "single_label_classification", "labels": LABELS}}
    (folder / "heads.json").write_text(json.dumps(heads))
    return export(
        factory="several_heads:Kinds",
        heads=folder / "heads.json",
        tokenizer="bytes",
        out=folder / "new.bundle",
    ).path


@pytest.fixture
def reloads(monkeypatch: pytest.MonkeyPatch, served_folder: Path, new_bundle: Path) -> list[str]:
    """Reload to the new bundle when the first request is read and not yet classified.

    The list has the method of the service before which the reload came.
    """
    done = list[str]()

    def after_reload(name: str) -> Any:
        method = getattr(Service, name)

        async def call(service: Service, *given: Any, **options: Any) -> Any:
            if not done:
                done.append(name)
                deploy(new_bundle, served_folder)
                await service.reloader.run()
            return await method(service, *given, **options)

        return call

    for name in ("classify", "check"):
        monkeypatch.setattr(Service, name, after_reload(name))
    return done


@pytest.fixture
def models(served_folder: Path) -> ModelRepository:
    return load_models(served_folder)


def post(models: ModelRepository, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    app = create_app(models)

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {}}, receive, send)  # a connection gives each request one

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(with_state)
        address = "http://127.0.0.1"
        async with (
            models.running(),
            httpx.AsyncClient(transport=transport, base_url=address) as client,
        ):
            return await client.post(path, json=body)

    found = asyncio.run(answer())
    return found.status_code, found.json()


@pytest.mark.parametrize(
    ("choices", "kinds"),
    [
        (OLD_CHOICES, ["refusal"]),
        (NEW_CHOICES, ["choice"]),
    ],
    ids=["old labels", "new labels"],
)
def test_decisions_are_of_new_model(
    choices: Any, kinds: list[str], models: ModelRepository, reloads: list[str]
) -> None:
    question = {"type": "choice", "instructions": "Which?", "choices": choices}
    body = {"model": MODEL, "input": "a", "questions": [question]}
    status, answer = post(models, "/v1/decisions", body)
    assert status == 200, answer
    assert [one["type"] for one in answer["answers"]] == kinds
    assert reloads == ["classify" if choices is OLD_CHOICES else "check"]


TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}


@pytest.mark.parametrize(
    ("path", "body", "label"),
    [
        ("/classify", {"input": "a"}, lambda answer: answer["data"][0]["label"]),
        ("/predict", {"inputs": "a", "raw_scores": True}, lambda answer: answer[0]["label"]),
        (
            f"/v2/models/{MODEL}/infer",
            {"inputs": [TEXT], "outputs": [{"name": "label"}]},
            lambda answer: answer["outputs"][0]["data"][0],
        ),
    ],
)
def test_formats_answer_by_new_output(
    path: str, body: Any, label: Any, models: ModelRepository, reloads: list[str]
) -> None:
    status, answer = post(models, path, body)
    assert status == 200, answer
    assert label(answer) in LABELS
    assert reloads


def test_call_is_answered_by_new_output(models: ModelRepository, reloads: list[str]) -> None:
    request = MESSAGES["ModelInferRequest"](model_name=MODEL)
    text = request.inputs.add(name="text", shape=[1], datatype="BYTES")
    text.contents.bytes_contents.append(b"a")
    request.outputs.add(name="label")

    async def answer() -> bytes:
        async with models.running():
            call = Call(0, float("inf"), ())
            content = request.SerializeToString()
            return await Methods(models)._model_infer(1 << 20, content, call)

    response = MESSAGES["ModelInferResponse"].FromString(asyncio.run(answer()))
    assert response.raw_output_contents[0][4:].decode() in LABELS
    assert reloads


class Replaced:
    """A service whose bundle is another one at each look."""

    def __init__(self) -> None:
        self.looks = itertools.count()

    @property
    def active(self) -> SimpleNamespace:
        return SimpleNamespace(bundle=SimpleNamespace(manifest=None, digest=str(next(self.looks))))


def test_bundle_that_is_always_replaced_ends_the_readings() -> None:
    readings = list[None]()

    async def answer(_: None) -> Any:
        return [SimpleNamespace(result=SimpleNamespace(bundle="another"))]

    work = read_and_answer(Replaced(), readings.append, answer)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="replaced during each of 4"):
        asyncio.run(work)
    assert len(readings) == 4
