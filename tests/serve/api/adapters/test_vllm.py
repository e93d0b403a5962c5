"""Classification in the format of vLLM and SGLang, by the requests of their clients."""

from typing import Any

import httpx
import openai
import pytest
import tiny_models
from served_heads import ANSWERS, TEXTS, infer


def classify(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/classify", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def results(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    return list(client.post("/infer", json=body).json()["results"])


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_text_gets_infer_answer(path: str, client: httpx.Client) -> None:
    (expected,) = results(client, {"texts": TEXTS[:1]})
    headers = {"X-Request-ID": "seven"}
    body = {"model": "model", "input": TEXTS[0]}
    answer = client.post(path, json=body, headers=headers).json()
    tokens = expected["tokens_used"]
    assert answer.pop("created") > 1e9
    probs = [*expected["scores"].values()]
    assert answer == {
        "id": "classify-seven",
        "object": "list",
        "model": "model",
        "data": [{"index": 0, "label": expected["label"], "probs": probs, "num_classes": 3}],
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }


@pytest.mark.parametrize("field", ["request_id", "rid"])
@pytest.mark.parametrize("ids", [[5, 6, 7], [[5, 6], [9]]], ids=["one", "several"])
def test_token_ids_get_infer_answers(
    ids: list[Any], field: str, heads_client: httpx.Client
) -> None:
    """The answer has the name in the body, before that in the header."""
    body = {"input": ids, field: "mine", "priority": 0, "user": "me"}
    sent = {"params": {"output": "topic"}, "headers": {"X-Request-ID": "seven"}}
    answer = heads_client.post("/classify", json=body, **sent).json()
    expected = results(heads_client, {"input_ids": ids if isinstance(ids[0], list) else [ids]})
    scores = [[*one["heads"]["topic"]["scores"].values()] for one in expected]
    assert [one["probs"] for one in answer["data"]] == scores
    assert answer["id"] == "classify-mine"


def test_logits_belong_to_probabilities(client: httpx.Client) -> None:
    (logits,) = classify(client, input=TEXTS[0], use_activation=False)["data"]
    (scores,) = classify(client, input=TEXTS[0], use_activation=True)["data"]
    assert scores["label"] == logits["label"] in tiny_models.LABELS
    powers = [2.718281828459045**logit for logit in logits["probs"]]
    assert scores["probs"] == pytest.approx([power / sum(powers) for power in powers], abs=1e-12)


def test_binary_output_has_logit_of_second_label(heads_client: httpx.Client) -> None:
    body = {"input": TEXTS[0], "use_activation": False}
    answer = heads_client.post("/classify", params={"output": "paid"}, json=body).json()
    (one,) = answer["data"]
    (logit,), scores = one["probs"], infer(heads_client, TEXTS[0])[0]["paid"]["scores"]
    assert one["num_classes"] == len(scores) == 2
    assert 1 / (1 + 2.718281828459045**-logit) == pytest.approx(scores[ANSWERS[1]], abs=1e-12)


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"input": "a", "model": "other"}, 404, "NotFoundError", "Expected the model 'heads', got"),
        ({"input": 5}, 422, "BadRequestError", "input must be a text, token ids"),
        ({"input": []}, 422, "BadRequestError", "got an empty array"),
        ({"input": ["a", 5]}, 422, "BadRequestError", "input.1 must be a text or token ids"),
        ({"input": [1, "a"]}, 422, "BadRequestError", "input.1: Input should be a valid integer"),
        ({"input": ["a"] * 5}, 413, "BadRequestError", "input must have at most 4 documents"),
        ({"input": "a" * 2001}, 413, "BadRequestError", "at most 2000 tokens"),
        ({"input": [[1], [999]]}, 422, "BadRequestError", "outside the vocabulary"),
        ({"input": "a", "truncate_prompt_tokens": 9}, 422, "BadRequestError", "truncate_prompt"),
        ({"input": "a", "messages": []}, 422, "BadRequestError", "known field, got 'messages'"),
        ({"model": None}, 422, "BadRequestError", "input: Field required"),
    ],
)
def test_refusals_have_format_of_vllm(
    body: dict[str, Any], status: int, kind: str, message: str, heads_client: httpx.Client
) -> None:
    answer = heads_client.post("/classify?output=topic", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, status, kind)
    assert message in error["message"]
    assert error["param"] is None


@pytest.mark.parametrize("output", [None, "age", "tags", "embedding", "other"])
def test_output_must_have_labels(output: str | None, heads_client: httpx.Client) -> None:
    params = {} if output is None else {"output": output}
    answer = heads_client.post("/classify", params=params, json={"input": "a"})
    assert answer.status_code == 422
    assert "Expected an output of topic, paid, flags, got" in answer.json()["error"]["message"]


def test_openai_client_reads_errors(server: str) -> None:
    """vLLM has no client of its own; its users send such requests by that of OpenAI."""
    with openai.OpenAI(base_url=server, api_key="none", max_retries=0) as client:
        answer = client.post("/classify", body={"input": "a"}, cast_to=dict[str, Any])
        assert answer["data"][0]["label"] in tiny_models.LABELS
        with pytest.raises(openai.NotFoundError, match="got 'other'"):
            client.post("/classify", body={"input": "a", "model": "other"}, cast_to=object)
        late = {"Deadline-Seconds": "1e-9"}
        with pytest.raises(openai.InternalServerError, match="504"):
            client.post("/classify", body={"input": "a"}, cast_to=object, options={"headers": late})


def test_method_and_unknown_path_keep_formats(client: httpx.Client) -> None:
    wrong = client.get("/classify")
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "POST")
    assert wrong.json()["error"]["type"] == "BadRequestError"
    assert client.get("/other").json().keys() == {"detail"}


def test_document_names_heads(heads_client: httpx.Client) -> None:
    document = heads_client.get("/openapi.json").json()
    (output,) = [
        parameter
        for parameter in document["paths"]["/classify"]["post"]["parameters"]
        if parameter["name"] == "output"
    ]
    assert output["required"]
    assert output["schema"]["enum"] == ["topic", "paid", "flags"]
    body = document["components"]["schemas"]["ClassificationRequest"]
    assert body["properties"]["model"] == {"enum": ["heads", None]}
