"""Decisions and the list of models, by OpenAI's own client."""

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from served_heads import ANSWERS, HEADS, TEXTS, TOPICS, infer
from typesafe_sdk import TypeSafeClient

from aftexport.heads import BinaryClassification, SingleLabelClassification
from aftserve.api.adapters.decisions import Labelled, Outputs, Statement

UNPROCESSABLE = openai.UnprocessableEntityError


@pytest.fixture
def client(heads_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{heads_server}/v1", api_key="none", max_retries=0) as client:
        yield client


def choice(values: Any, **fields: Any) -> dict[str, Any]:
    choices = [{"value": value} for value in values]
    return {"type": "choice", "instructions": "Which?", "choices": choices, **fields}


def score(labels: Any, **fields: Any) -> dict[str, Any]:
    levels = [{"label": label} for label in labels]
    return {"type": "score", "instructions": "How much?", "levels": levels, **fields}


def predicate(name: str | None, **fields: Any) -> dict[str, Any]:
    named = {} if name is None else {"name": name}
    return {"type": "predicate", "instructions": "Is it so?", **named, **fields}


def decide(client: openai.OpenAI, *questions: Any, given: Any = TEXTS[0]) -> list[dict[str, Any]]:
    decision = client.decisions.create(model="heads", input=given, questions=questions)
    return [answer.model_dump() for answer in decision.answers]


def test_outputs_answer_their_questions(client: openai.OpenAI, heads_client: httpx.Client) -> None:
    (heads,) = infer(heads_client, TEXTS[0])
    topic, paid, flags = (heads[name] for name in ("topic", "paid", "flags"))
    shuffled = [TOPICS[2], TOPICS[0], TOPICS[1]]
    found = decide(
        client,
        choice(shuffled),
        choice(ANSWERS, name="paid"),
        score(shuffled, name="any"),
        predicate("paid"),
        predicate("urgent"),
        predicate("topic:letter"),
    )
    label = topic["label"]
    rows = [{"value": one, "probability": topic["scores"][one]} for one in shuffled]
    assert found[0] == {
        "type": "choice",
        "name": None,
        "choice": label,
        "confidence": topic["scores"][label],
        "probabilities": rows,
    }
    assert (found[1]["choice"], found[1]["name"]) == (paid["label"], "paid")
    assert found[2] == {
        "type": "score",
        "name": "any",
        "score": sum(i * topic["scores"][one] for i, one in enumerate(shuffled)),
        "confidence": topic["scores"][label],
        "probabilities": [
            {"label": one, "value": i, "probability": topic["scores"][one]}
            for i, one in enumerate(shuffled)
        ],
    }
    probabilities = [answer["probability"] for answer in found[3:]]
    assert probabilities == [
        paid["scores"]["yes"], flags["scores"]["urgent"], topic["scores"]["letter"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    "question",
    [
        choice(["spam", "ham"]),
        choice([*TOPICS, "spam"], name="topic"),
        choice([*TOPICS, TOPICS[0]]),
        choice(TOPICS, name="paid"),
        choice(TOPICS, name="age"),
        choice([True, False]),
        score(["low", "high"]),
        predicate(None),
        predicate("age"),
        predicate("topic"),
        predicate("embedding:dimension_0"),
    ],
)
def test_other_questions_are_refused_alone(question: Any, client: openai.OpenAI) -> None:
    refused, answered = decide(client, question, predicate("legal"))
    assert refused == {"type": "refusal", "name": question.get("name")}
    assert answered["type"] == "predicate"


def test_usage_counts_tokens(client: openai.OpenAI) -> None:
    for questions, tokens in (([predicate("legal")], 5), ([predicate("none")], 0)):
        decision = client.decisions.create(model="heads", input="abcde", questions=questions)
        usage = decision.usage
        assert (usage.input_tokens, usage.total_tokens, usage.output_tokens) == (tokens, tokens, 0)
        assert decision.model == "heads"


@pytest.mark.parametrize(
    ("name", "stages"), [("legal", ["tokenize", "queue", "compute"]), ("none", ["tokenize"])]
)
def test_response_times_its_stages(name: str, stages: list[str], client: openai.OpenAI) -> None:
    """A decision of refusals only has the time of the check of its document."""
    response = client.decisions.with_raw_response.create(
        model="heads", input="abcde", questions=[predicate(name)]
    )
    assert re.findall(r"(\w+);dur=\d", response.headers["Server-Timing"]) == stages


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": TEXTS[0]}],
        [{"role": "user", "content": [{"type": "input_text", "text": TEXTS[0]}]}],
    ],
)
def test_other_forms_of_text_are_read(given: Any, client: openai.OpenAI) -> None:
    assert decide(client, choice(TOPICS), given=given) == decide(client, choice(TOPICS))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("", UNPROCESSABLE, "has no tokens"),
        ([999], UNPROCESSABLE, "outside the vocabulary"),
        ("a" * 2001, openai.APIStatusError, "at most 2000 tokens"),
    ],
    ids=["empty", "id", "long"],
)
def test_document_without_answers_is_checked(
    given: Any, error: type[Exception], message: str, client: openai.OpenAI
) -> None:
    with pytest.raises(error, match=message):
        decide(client, predicate("none"), given=given)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "gpt-6-luna"}, openai.NotFoundError, "the model 'heads', got 'gpt"),
        ({"questions": []}, UNPROCESSABLE, "at least 1 item"),
        ({"questions": [predicate("urgent")] * 401}, UNPROCESSABLE, "at most 400"),
        ({"input": [{"role": "system", "content": "a"}]}, UNPROCESSABLE, "user"),
        ({"input": [{"role": "user", "content": "a"}] * 2}, UNPROCESSABLE, "at most 1"),
        ({"input": ""}, UNPROCESSABLE, "has no tokens"),
        ({"input": "a" * 2001}, openai.APIStatusError, "at most 2000 tokens"),
        ({"extra_headers": {"Deadline-Seconds": "1e-9"}}, openai.InternalServerError, "deadline"),
    ],
)  # fmt: skip
def test_refusals_reach_client(
    changes: dict[str, Any], error: type[Exception], message: str, client: openai.OpenAI
) -> None:
    request = {"model": "heads", "input": "a", "questions": [predicate("urgent")]} | changes
    with pytest.raises(error, match=message):
        client.decisions.create(**request)


MANY = tuple(f"label {i}" for i in range(5000))
OUTPUTS = {
    "many": SingleLabelClassification(labels=MANY),
    "paid": BinaryClassification(labels=("no", "yes")),
    "sent": BinaryClassification(labels=("no", "yes")),
}


def test_questions_find_outputs() -> None:
    outputs = Outputs(OUTPUTS)
    assert outputs.of_labels(None, MANY[::-1]) == [Labelled("many", MANY[::-1])]
    assert outputs.of_labels("paid", ["yes", "no"]) == [Labelled("paid", ("yes", "no"))]
    assert [one.head for one in outputs.of_labels("other", ["yes", "no"])] == ["paid", "sent"]
    for labels in (["yes", "yes"], ["yes"], ["yes", "no", "no"], ["yes", "no", {}], [True, "no"]):
        assert outputs.of_labels(None, labels) == []
    assert outputs.of_statement("paid") == [Statement("paid", "yes")]
    assert outputs.of_statement("sent:no") == [Statement("sent", "no")]
    assert outputs.of_statement("yes") == [Statement("paid", "yes"), Statement("sent", "yes")]
    assert outputs.of_statement("label 7") == [Statement("many", "label 7")]
    assert outputs.of_statement(None) == outputs.of_statement("many") == []


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
