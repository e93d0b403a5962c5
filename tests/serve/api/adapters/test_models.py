"""The list of models, by the clients of OpenAI and TypeSafe."""

import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from served_heads import HEADS
from typesafe_sdk import TypeSafeClient


@pytest.fixture
def client(heads_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{heads_server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_client_lists_model(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("heads", "model", "aftserve")
    assert time.time() - 86_400 < model.created <= time.time()  # in seconds
    assert client.models.retrieve("heads") == model
    with pytest.raises(openai.NotFoundError, match="Expected the model 'heads', got 'other'"):
        client.models.retrieve("other")


def test_typesafe_client_lists_model(heads_server: str) -> None:
    with TypeSafeClient(base_url=heads_server, api_key="none") as client:
        (model,) = client.models.list().models
    assert model.name == "heads"
    assert model.description == ", ".join(f"{n}: {head['task']}" for n, head in HEADS.items())


def test_unknown_model_has_format_of_openai(heads_client: httpx.Client) -> None:
    answer = heads_client.get("/v1/models/other")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
