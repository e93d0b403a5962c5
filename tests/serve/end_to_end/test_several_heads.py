"""A model with heads for documents and for tokens: spans, limits, streams, parity and choices."""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import served_heads
from clients import head, http, raw_connection
from servers import Serve
from tokenizers import Tokenizer, models, pre_tokenizers

from aftserve.client import Client, TooLongError

LINES = "application/x-ndjson"
TEXTS = ["An invoice from Zoë 😀.", "a", "Pay by 3 May, or the contract ends. " * 9]


@pytest.fixture(scope="module")
def address(heads_bundle: Path, serve: Serve) -> str:
    options = ("--reference", str(heads_bundle.with_name("model.pt")))
    factory = ("--reference-factory", "served_heads:EveryHead")
    support = str(Path(served_heads.__file__).parent)
    return serve(heads_bundle, *options, *factory, PYTHONPATH=support)


def post(address: str, content: Any, **headers: str) -> httpx.Response:
    return http.post(f"{address}/infer", json=content, headers=headers, timeout=120)


def heads_of(address: str, text: str) -> dict[str, Any]:
    answer = post(address, {"text": text})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["heads"])


def assert_spans_fit(tags: dict[str, Any], text: str) -> None:
    """Check the spans: labels of their tokens, and characters of a text of one byte a token."""
    for span in tags["spans"]:
        labels = tags["labels"][span["start_token"] : span["end_token"]]
        assert {label[2:] for label in labels} == {span["label"]}
        encoded = text.encode()
        assert span["start"] == len(encoded[: span["start_token"]].decode(errors="ignore"))
        assert span["text"] == text[span["start"] : span["end"]]
        last = encoded[: span["end_token"]].decode(errors="replace")
        assert span["end"] == len(last.rstrip("\ufffd")) + last.endswith("\ufffd")
    starts = [span["start_token"] for span in tags["spans"]]
    outside = [label == "O" for label in tags["labels"]]
    assert starts == sorted(starts)
    covered = sum(span["end_token"] - span["start_token"] for span in tags["spans"])
    assert covered == outside.count(False)


def test_shared_run_keeps_tokens_apart(address: str) -> None:
    results = post(address, {"texts": TEXTS * 4}).json()["results"]
    assert len(results) == 4 * len(TEXTS)
    for result, text in zip(results, TEXTS * 4, strict=True):
        heads, outputs = result["heads"], served_heads.outputs(list(text.encode()))
        vectors, scores = outputs["vectors"], outputs["tags"].softmax(1).amax(1)
        np.testing.assert_allclose(heads["vectors"]["vectors"], vectors, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(heads["tags"]["scores"], scores, atol=1e-4)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_spans_fit_labels_and_text(address: str, text: str) -> None:
    assert_spans_fit(heads_of(address, text)["tags"], text)


def test_long_line_fails_alone(address: str) -> None:
    lines = [{"text": "a"}, {"input_ids": [5] * 70_000}]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    answer = http.post(
        f"{address}/infer", content=content, headers={"Content-Type": LINES}, timeout=120
    )
    first, problem = map(json.loads, answer.text.splitlines())
    assert first["heads"].keys() == served_heads.HEADS.keys()
    assert problem["status"] == 413
    assert "x-ndjson" in problem["detail"]


def test_half_closed_client_gets_every_line(address: str) -> None:
    body = json.dumps({"text": TEXTS[2] * 30}).encode()
    received = b""
    with raw_connection(address) as connection:
        connection.sendall(head(len(body), f"Accept: {LINES}", "Connection: close") + body)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 16):
            received += part
    assert b'{"complete":true,"lines":10}' in received
    assert received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("accept", ["*/*", "application/json", f"{LINES};q=0", "text/html, */*"])
def test_json_unless_lines_are_named(address: str, accept: str) -> None:
    answer = post(address, {"text": "a"}, Accept=accept)
    assert answer.headers["content-type"] == "application/json"
    assert "heads" in answer.json()


def test_long_inline_answer_is_refused(address: str) -> None:
    limit = http.get(f"{address}/info").json()["limits"]["max_inline_tokens"]
    assert limit == 65_536
    answer = post(address, {"input_ids": [[5] * (limit + 1)]})
    assert answer.status_code == 413
    assert "Accept: application/x-ndjson" in answer.json()["detail"]
    answer = post(address, {"input_ids": [[5] * limit] * 5})
    assert answer.status_code == 413
    assert "several requests" in answer.json()["detail"]


def test_long_tensors_must_be_binary(address: str) -> None:
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 70_000], "data": [5] * 70_000}
    refused = http.post(f"{address}/v2/models/heads/infer", json={"inputs": [ids]}, timeout=120)
    assert refused.status_code == 413
    outputs = [
        {"name": "tags.labels", "parameters": {"binary_data": True}},
        {"name": "topic.label"},
    ]
    body = {"inputs": [ids], "outputs": outputs}
    answer = http.post(f"{address}/v2/models/heads/infer", json=body, timeout=120)
    size = int(answer.headers["Inference-Header-Content-Length"])
    found = [output["name"] for output in json.loads(answer.content[:size])["outputs"]]
    assert found == ["topic.label", "tags.labels"]
    assert len({*np.frombuffer(answer.content[size:], "<i8")}) == 1


def test_client_stream_raises_refusals(address: str) -> None:
    with Client(address) as client, pytest.raises(TooLongError), client.stream([5] * 1_100_000):
        pass


def test_parity_is_of_every_output(address: str) -> None:
    golden = http.get(f"{address}/parity").json()["golden"]
    ours = [case for case in golden if case["subject"] == "model"]
    assert {case["output"] for case in ours} == served_heads.WIDTHS.keys()
    assert all(case["score_error"] <= case["bound"] for case in ours)
    check = http.post(f"{address}/parity", json={"text": TEXTS[2]}, timeout=120).json()
    assert check["within"]
    assert check["heads"].keys() == served_heads.WIDTHS.keys()
    for name, found in check["heads"].items():
        assert 0 < found["error"] <= check["bound"], name
        assert found["score_error"] <= check["bound"]
        assert (found["label_flips"], found["span_flips"]) == (0, 0 if name == "tags" else None)
    outputs, of_documents = served_heads.outputs(list(TEXTS[2].encode())), []
    for name, width in served_heads.WIDTHS.items():
        of_documents += [name] * width if name not in served_heads.FOR_TOKENS else []
    assert [output["head"] for output in check["outputs"]] == of_documents
    wanted = [number for name in dict.fromkeys(of_documents) for number in outputs[name].tolist()]
    assert [output["reference"] for output in check["outputs"]] == pytest.approx(wanted, abs=1e-12)


def test_info_describes_every_head(address: str) -> None:
    heads = http.get(f"{address}/info").json()["heads"]
    assert {name: head["task"] for name, head in heads.items()} == {
        name: head["task"] for name, head in served_heads.HEADS.items()
    }
    assert heads["age"]["values"] == [
        {
            "name": "years", "unit": "years", "minimum": None, "maximum": None, "scale": 12.5,
            "offset": 40.0,
        }
    ]  # fmt: skip
    known = http.get(f"{address}/v2/models/heads").json()["outputs"]
    (names,) = [output["parameters"]["labels"] for output in known if "parameters" in output]
    assert names == list(served_heads.TAGS)
    assert heads["tags"]["labels"] == list(served_heads.TAGS)
    assert (heads["tags"]["scheme"], heads["tags"]["aggregation"]) == ("bio", "simple")
    assert heads["vectors"]["per_token"]


def test_outputs_for_documents_are_answered_alone(address: str) -> None:
    """The limit of inline answers for tokens is not that of a request for other outputs."""
    long = {"input_ids": [[5, 6, 7] * 30_000]}
    assert post(address, long).status_code == 413
    query = {"outputs": ["topic", "embedding"]}
    answer = http.post(f"{address}/infer", json=long, params=query, timeout=120)
    assert answer.status_code == 200, answer.text
    (result,) = answer.json()["results"]
    assert [*result["heads"]] == ["topic", "embedding"]
    every = heads_of(address, TEXTS[2])
    for name in ("topic", "tags"):
        one = http.post(f"{address}/infer", json={"text": TEXTS[2]}, params={"outputs": name})
        assert one.json()["heads"] == {name: every[name]}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tags", "token_classification has no labels or values of documents"),
        ("B-name", "token_classification has no labels or values of documents"),
        ("vectors", "feature_extraction has no labels or values of documents"),
        ("embedding", "feature_extraction has no labels or values of documents"),
    ],
)
def test_other_heads_are_not_explained(address: str, name: str, reason: str) -> None:
    query = {"explain": name}
    answer = http.post(f"{address}/infer", json={"text": TEXTS[2]}, params=query)
    assert answer.status_code == 422
    assert reason in answer.json()["detail"]
    assert answer.json()["detail"].endswith(
        "Choose an output with evidence: topic, paid, flags, age."
    )


@pytest.fixture(scope="module")
def words(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Serve the same model with spans of words, by the first token of each."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "may": 1, "be": 2, "##lace": 3, "##d": 4}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("words")
    return serve(served_heads.exported(folder, aggregation="first", tokenizer=tokenizer))


def test_spans_are_of_whole_words(words: str) -> None:
    text = "may belaced be mayd may"
    tags = heads_of(words, text)["tags"]
    outputs = served_heads.outputs([1, 2, 3, 4, 2, 1, 4, 1])
    labels = [served_heads.TAGS[place] for place in outputs["tags"].argmax(1).tolist()]
    assert tags["labels"] == labels
    starts = {0: 0, 4: 1, 12: 4, 15: 5, 20: 7}
    ends = {3: 1, 11: 4, 14: 5, 19: 7, 23: 8}
    assert tags["spans"]
    for span in tags["spans"]:
        assert span["start_token"] == starts[span["start"]]
        assert span["end_token"] == ends[span["end"]]
        assert span["label"] == labels[span["start_token"]][2:]


def test_spans_of_words_need_text(words: str) -> None:
    refused = post(words, {"input_ids": [[1, 2]]})
    query = {"outputs": "topic"}
    answered = http.post(f"{words}/infer", json={"input_ids": [[1, 2]]}, params=query)
    assert answered.status_code == 200, answered.text
    assert refused.status_code == 422
    assert "Send the text" in refused.json()["detail"]
