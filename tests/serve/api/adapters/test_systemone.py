"""System One, by TypeSafe's own client."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served_heads import ANSWERS, TEXTS, TOPICS, infer
from typesafe_sdk import (
    Choice,
    Noul,
    RetryPolicy,
    Score,
    TypeSafeClient,
    TypeSafeInternalServerError,
    TypeSafeNotFoundError,
    TypeSafeUnprocessableEntityError,
)


@pytest.fixture
def client(heads_server: str) -> Iterator[TypeSafeClient]:
    with TypeSafeClient(base_url=heads_server, api_key="none", model="heads") as client:
        yield client


URGENT = {"urgent": Noul(instructions="Is it urgent?")}


def test_outputs_answer_their_questions(client: TypeSafeClient, heads_client: httpx.Client) -> None:
    (heads,) = infer(heads_client, TEXTS[0])
    topic, paid, flags = (heads[name] for name in ("topic", "paid", "flags"))
    levels = [TOPICS[2], TOPICS[0], TOPICS[1]]
    questions: dict[str, Any] = {
        "kind": Choice(criteria=dict.fromkeys(levels)),
        "paid": Choice(criteria=dict.fromkeys(ANSWERS)),
        "rank": Score(criteria=levels),
        "flags:legal": Noul(instructions="Is it legal?"),
        **URGENT,
    }
    found = client.system_one(TEXTS[0], questions)
    kind, rank = found.choices["kind"], found.scores["rank"]
    assert kind.choice == topic["label"]
    assert kind.confidence == topic["scores"][topic["label"]]
    assert kind.probabilities == topic["scores"]
    assert [*kind.probabilities] == levels
    assert found.choices["paid"].probabilities == paid["scores"]
    assert rank.score == sum(i * topic["scores"][one] for i, one in enumerate(levels))
    assert rank.legend == dict(enumerate(levels))
    assert rank.probabilities == {i: topic["scores"][one] for i, one in enumerate(levels)}
    assert found.nouls["urgent"].noul == flags["scores"]["urgent"]
    assert found.nouls["flags:legal"].noul == flags["scores"]["legal"]
    assert (found.model, found.usage.input_tokens) == ("heads", len(TEXTS[0].encode()))


def test_token_ids_are_read(client: TypeSafeClient) -> None:
    ids: Any = [*TEXTS[0].encode()]
    assert client.system_one(ids, URGENT).answers == client.system_one(TEXTS[0], URGENT).answers


def test_compressed_body_is_read(client: TypeSafeClient, heads_server: str) -> None:
    """The client compresses bodies of at least 1,024 bytes by zstd, if it is not told otherwise."""
    text = "a contract, " * 99
    with TypeSafeClient(
        base_url=heads_server, api_key="none", model="heads", compression="zstd"
    ) as zstd:
        found = [one.system_one(text, URGENT).answers for one in (client, zstd)]
    with TypeSafeClient(
        base_url=heads_server, api_key="none", model="heads", compression=False
    ) as plain:
        assert found == [plain.system_one(text, URGENT).answers] * 2


def test_each_other_question_is_refused(client: TypeSafeClient) -> None:
    questions: dict[str, Any] = {
        "age": Score(criteria=["young", "old"]),
        "mood": Choice(criteria={"angry": None, "calm": None}),
        "photo": {"type": "box", "instructions": "Where?"},
        "spam": Noul(instructions="Is it spam?"),
        **URGENT,
    }
    with pytest.raises(TypeSafeUnprocessableEntityError) as raised:
        client.system_one("a", questions)
    detail = raised.value.body["detail"]
    kinds = {"age": "score", "mood": "choice", "photo": "box", "spam": "noul"}
    places = [["body", "questions", name, kind] for name, kind in kinds.items()]
    assert [one["loc"] for one in detail] == places
    assert {one["type"] for one in detail} == {"unanswerable_question"}
    assert "topic: invoice, contract, letter" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"model": "jev-latest"},
            TypeSafeNotFoundError,
            "Expected the model 'heads', got 'jev-latest'",
        ),
        ({"state": {"subject": "a"}}, TypeSafeUnprocessableEntityError, "got an object"),
        ({"state": ""}, TypeSafeUnprocessableEntityError, "has no tokens"),
        (
            {"questions": {str(i): URGENT["urgent"] for i in range(401)}},
            TypeSafeUnprocessableEntityError,
            "expected at most 400 questions",
        ),
        ({"extra_headers": {"Deadline-Seconds": "1e-9"}}, TypeSafeInternalServerError, "deadline"),
        ({"extra_headers": {"Deadline-Seconds": "x"}}, TypeSafeUnprocessableEntityError, "header"),
    ],
)
def test_refusals_reach_client(
    changes: dict[str, Any], error: type[Exception], message: str, client: TypeSafeClient
) -> None:
    request: dict[str, Any] = {"state": "a", "questions": URGENT} | changes
    with pytest.raises(error, match=message):
        client.system_one(**request, retry=RetryPolicy(max_retries=0))
