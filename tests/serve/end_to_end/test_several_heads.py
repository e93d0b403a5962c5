"""A model with heads for documents and for tokens is served as PyTorch computes it."""

import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import served_heads
from clients import head, http, raw_connection
from servers import serving
from tokenizers import Tokenizer, models, pre_tokenizers

from aftserve.client import Client, ServerError, TooLongError

LINES = "application/x-ndjson"
TEXTS = ["An invoice from Zoë 😀.", "a", "Pay by 3 May, or the contract ends. " * 9]
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("heads")
    bundle = served_heads.exported(folder)
    options = ("--reference", str(folder / "model.pt"))
    factory = ("--reference-factory", "served_heads:EveryHead")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(served_heads.__file__).parent))
        with serving(bundle, folder / "log", *options, *factory) as (address, _):
            yield address
    assert "Traceback" not in (folder / "log").read_text("utf-8")


def post(address: str, content: Any, **headers: str) -> httpx.Response:
    return http.post(f"{address}/infer", json=content, headers=headers, timeout=120)


def heads_of(address: str, text: str) -> dict[str, Any]:
    answer = post(address, {"text": text})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["heads"])


def assert_of_pytorch(heads: dict[str, Any], text: str) -> None:
    """Compare the answers of all heads with PyTorch in float64."""
    outputs = served_heads.outputs(list(text.encode()))
    topics = outputs["topic"].softmax(0).tolist()
    np.testing.assert_allclose(list(heads["topic"]["scores"].values()), topics, **TOLERANCE)
    assert heads["topic"]["label"] == served_heads.TOPICS[int(np.argmax(topics))]
    scores = outputs["tags"].softmax(1)
    expected = [served_heads.TAGS[place] for place in scores.argmax(1).tolist()]
    assert heads["tags"]["labels"] == expected
    np.testing.assert_allclose(heads["tags"]["scores"], scores.amax(1), **TOLERANCE)
    np.testing.assert_allclose(heads["vectors"]["vectors"], outputs["vectors"], **TOLERANCE)
    embedding = outputs["embedding"] / outputs["embedding"].norm()
    np.testing.assert_allclose(heads["embedding"]["vector"], embedding, **TOLERANCE)


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


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_answers_are_those_of_pytorch(address: str, text: str) -> None:
    heads = heads_of(address, text)
    assert list(heads) == list(served_heads.WIDTHS)
    assert_of_pytorch(heads, text)
    assert_spans_fit(heads["tags"], text)


def test_shared_run_keeps_tokens_apart(address: str) -> None:
    results = post(address, {"texts": TEXTS * 4}).json()["results"]
    assert len(results) == 4 * len(TEXTS)
    for result, text in zip(results, TEXTS * 4, strict=True):
        assert_of_pytorch(result["heads"], text)


def test_lines_have_whole_answers(address: str) -> None:
    lines = [{"text": text} for text in TEXTS] + [{"input_ids": [5] * 70_000}]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    answer = http.post(
        f"{address}/infer", content=content, headers={"Content-Type": LINES}, timeout=120
    )
    *results, problem = map(json.loads, answer.text.splitlines())
    for result, text in zip(results, TEXTS, strict=True):
        assert_of_pytorch(result["heads"], text)
    assert problem["status"] == 413
    assert "x-ndjson" in problem["detail"]


def test_token_ids_have_no_characters(address: str) -> None:
    ids = list(TEXTS[2].encode())
    (result,) = post(address, {"input_ids": [ids]}).json()["results"]
    assert_of_pytorch(result["heads"], TEXTS[2])
    assert result["heads"]["tags"]["spans"]
    assert all(
        "text" not in span and "start" not in span for span in result["heads"]["tags"]["spans"]
    )


def joined(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the lines of a streamed answer to the heads of a whole one."""
    first, *parts, end = lines
    assert end == {"complete": True, "lines": len(lines) - 1}
    heads = dict(first["heads"])
    for part in parts:
        head = heads.setdefault(part["head"], {})
        if "start_token" in part:
            values = part.get("labels", part.get("vectors"))
            known = head.get("labels", head.get("vectors", ()))
            assert part["start_token"] == len(known)
            assert len(values) <= 4096
        for field in part.keys() - {"head", "start_token"}:
            head.setdefault(field, []).extend(part[field])
    return heads


def test_streamed_answer_is_that_of_json(address: str) -> None:
    text = TEXTS[2] * 30
    whole = heads_of(address, text)
    answer = post(address, {"text": text}, Accept=LINES)
    assert answer.headers["content-type"] == LINES
    lines = [json.loads(line) for line in answer.content.splitlines()]
    # The document, 3 parts of tags and of their spans, 3 of vectors, the end.
    assert len(lines) == 11
    assert lines[0]["tokens_used"] == len(text)
    assert joined(lines) == {name: whole[name] for name in joined(lines)}
    assert joined(lines).keys() == whole.keys()


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


def tensors(address: str, inputs: Any, **fields: Any) -> dict[str, Any]:
    body = {"inputs": inputs, **fields}
    answer = http.post(f"{address}/v2/models/model/infer", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    length = answer.headers.get("Inference-Header-Content-Length")
    head, rest = answer.content[: int(length)] if length else answer.content, answer.content
    rest = rest[len(head) :]
    found = {}
    for output in json.loads(head)["outputs"]:
        data = output.get("data")
        if data is None:
            size = output["parameters"]["binary_data_size"]
            part, rest = rest[:size], rest[size:]
            if output["datatype"] == "BYTES":
                found[output["name"]] = strings(part)
                continue
            kinds = {"INT64": "<i8", "FP32": "<f4", "BOOL": "?"}
            data = np.frombuffer(part, kinds[output["datatype"]])
        found[output["name"]] = np.array(data).reshape(output["shape"])
    assert not rest
    return found


def strings(content: bytes) -> list[str]:
    found = []
    while content:
        size = int.from_bytes(content[:4], "little")
        found.append(content[4 : 4 + size].decode())
        content = content[4 + size :]
    return found


def test_tensors_are_those_of_json(address: str) -> None:
    known = http.get(f"{address}/v2/models/model").json()["outputs"]
    names = next(output["parameters"]["labels"] for output in known if "parameters" in output)
    assert names == list(served_heads.TAGS)
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}]
    listed = tensors(address, inputs)
    binary = tensors(address, inputs, parameters={"binary_data_output": True})
    assert list(listed) == list(binary) == [output["name"] for output in known]
    for name in listed:
        np.testing.assert_array_equal(binary[name], listed[name], err_msg=name)
    longest = max(len(text.encode()) for text in TEXTS)
    assert listed["tags.labels"].shape == (len(TEXTS), longest)
    for row, text in enumerate(TEXTS):
        heads = heads_of(address, text)
        used = listed["tokens_used"][row]
        labels = [served_heads.TAGS[place] for place in listed["tags.labels"][row, :used]]
        assert labels == heads["tags"]["labels"]
        assert (listed["tags.labels"][row, used:] == -1).all()
        for name, field in (("tags", "scores"), ("vectors", "vectors")):
            np.testing.assert_allclose(
                listed[f"{name}.{field}"][row, :used], heads[name][field], rtol=1e-6, atol=1e-6
            )
            assert not listed[f"{name}.{field}"][row, used:].any()
        np.testing.assert_allclose(
            listed["embedding.vector"][row], heads["embedding"]["vector"], rtol=1e-6, atol=1e-6
        )
        assert json.loads(listed["tags.spans"][row]) == heads["tags"]["spans"]


def test_long_tensors_must_be_binary(address: str) -> None:
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 70_000], "data": [5] * 70_000}
    refused = http.post(f"{address}/v2/models/model/infer", json={"inputs": [ids]}, timeout=120)
    assert refused.status_code == 413
    outputs = [
        {"name": "tags.labels", "parameters": {"binary_data": True}},
        {"name": "topic.label"},
    ]
    found = tensors(address, [ids], outputs=outputs)
    assert list(found) == ["topic.label", "tags.labels"]
    assert len(np.unique(found["tags.labels"])) == 1


def test_client_reads_and_streams_heads(address: str) -> None:
    text = TEXTS[2] * 20
    with Client(address) as client:
        heads = client.infer(text).heads
        assert heads is not None
        tags = heads["tags"]
        assert tags.spans is not None
        labels, spans, vectors = list[str](), list[Any](), list[Any]()
        with client.stream(text) as answer:
            assert answer.result.heads is not None
            assert answer.result.heads["topic"] == heads["topic"]
            for part in answer:
                labels += part.labels or ()
                spans += part.spans or ()
                vectors += part.vectors or ()
        (lines,) = client.infer_each([text])
    assert labels == tags.labels
    assert spans == tags.spans
    assert spans[0].text == text[spans[0].start : spans[0].end]
    assert vectors == heads["vectors"].vectors
    assert not isinstance(lines, ServerError)
    assert lines.heads == heads


def test_client_stream_raises_refusals(address: str) -> None:
    with Client(address) as client, pytest.raises(TooLongError), client.stream([5] * 1_100_000):
        pass


def test_parity_is_of_every_output(address: str) -> None:
    check = http.post(f"{address}/parity", json={"text": TEXTS[2]}, timeout=120).json()
    assert check["within"]
    assert check["heads"].keys() == served_heads.WIDTHS.keys()
    for name, found in check["heads"].items():
        assert 0 < found["error"] <= check["bound"], name
        assert found["score_error"] <= check["bound"]
        assert (found["label_flips"], found["span_flips"]) == (0, 0 if name == "tags" else None)
    assert {output["head"] for output in check["outputs"]} == {"topic", "embedding"}


def test_info_describes_every_head(address: str) -> None:
    heads = http.get(f"{address}/info").json()["heads"]
    assert list(heads) == list(served_heads.WIDTHS)
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
    assert answer.json()["detail"].endswith("Choose an output with evidence: topic.")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the same model with spans of words, by the first token of each."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "may": 1, "be": 2, "##lace": 3, "##d": 4}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    bundle = served_heads.exported(folder, aggregation="first", tokenizer=tokenizer)
    with serving(bundle, folder / "log") as (address, _):
        yield address


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
