"""Requests that ``POST /infer`` refuses, each with a reason in JSON."""

import gzip
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

JSON = {"content-type": "application/json"}

BAD_DOCUMENTS: dict[str, object] = {
    "null": None,
    "a number": 1,
    "a word": "text",
    "a list": [{"text": "a"}],
    "no form": {},
    "only nulls": {"text": None, "texts": None, "input_ids": None},
    "two forms": {"text": "a", "texts": ["b"]},
    "three forms": {"text": "a", "texts": ["b"], "input_ids": [[1]]},
    "unknown field": {"text": "a", "truncate": True},
    "unknown field with a lone surrogate": {"text": "a", "\ud800": 1},
    "text is a number": {"text": 5},
    "text is a list": {"text": ["a"]},
    "text is empty": {"text": ""},
    "text with a lone surrogate": {"text": "a\ud800b"},
    "texts is a text": {"texts": "ab"},
    "texts is empty": {"texts": []},
    "texts with an empty one": {"texts": ["a", ""]},
    "texts with null": {"texts": ["a", None]},
    "texts with a nested list": {"texts": [["a"]]},
    "texts with a lone surrogate": {"texts": ["a", "\udfff"]},
    "ids in a flat list": {"input_ids": [1, 2]},
    "ids are empty": {"input_ids": []},
    "ids of an empty document": {"input_ids": [[1], []]},
    "ids nested too deeply": {"input_ids": [[[1]]]},
    "ids with null": {"input_ids": [None]},
    "ids are an object": {"input_ids": {"0": [1]}},
    "id outside the vocabulary": {"input_ids": [[1, 300]]},
    "id is negative": {"input_ids": [[-1]]},
    "id is a fraction": {"input_ids": [[1.5]]},
    "id is NaN": {"input_ids": [[float("nan")]]},
    "id is infinite": {"input_ids": [[float("inf")]]},
    "id is a boolean": {"input_ids": [[True]]},
    "id is a text": {"input_ids": [["1"]]},
    "id just outside int64": {"input_ids": [[1 << 63]]},
    "id is huge": {"input_ids": [[10**30]]},
}

BAD_BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    "empty": (b"", JSON),
    "not JSON": (b"hello", JSON),
    "truncated JSON": (b'{"text": "a', JSON),
    "not UTF-8": (b'{"text": "\xff\xfe"}', JSON),
    "overlong UTF-8": (b'{"text": "\xc0\xaf"}', JSON),
    "surrogate in UTF-8": (b'{"text": "\xed\xa0\x80"}', JSON),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), JSON),
    "UTF-16 with its charset": (
        '{"text": "a"}'.encode("utf-16-le"),
        {"content-type": "application/json; charset=utf-16le"},
    ),
    "Latin-1 with its charset": (
        '{"text": "ä"}'.encode("latin-1"),
        {"content-type": "application/json; charset=latin-1"},
    ),
    "UTF-8 after a byte order mark": (b'\xef\xbb\xbf{"text": "a"}', JSON),
    "compressed twice": (gzip.compress(b""), JSON | {"content-encoding": "gzip, gzip"}),
    "of an unknown encoding": (b'{"text": "a"}', JSON | {"content-encoding": "br"}),
    "falsely marked as gzip": (b'{"text": "a"}', JSON | {"content-encoding": "gzip"}),
    "falsely marked as zstd": (b'{"text": "a"}', JSON | {"content-encoding": "zstd"}),
    "without the end of the stream": (
        gzip.compress(b'{"text": "a"}')[:-8],
        JSON | {"content-encoding": "gzip"},
    ),
    "NaN": (b"NaN", JSON),
    "NaN in place of a text": (b'{"text": NaN}', JSON),
    "infinity": (b'{"input_ids": [[-Infinity]]}', JSON),
    "a number outside float64": (b'{"input_ids": [[1e999]]}', JSON),
    "a control character": (b'{"text": "\x01"}', JSON),
    "an incomplete escape": (b'{"text": "\\ud8"}', JSON),
    "two values": (b'{"text": "a"} {"text": "b"}', JSON),
    "deeply nested objects": (b'{"text":' * 100_000, JSON),
    "a deeply nested unknown field": (
        b'{"x":' + b'{"a":' * 9999 + b"1" + b"}" * 10_000,
        JSON,
    ),
    "deeply nested lists": (b"[" * 100_000, JSON),
    "deeply nested ids": (b'{"input_ids":' + b"[" * 9999 + b"]" * 9999 + b"}", JSON),
    "number of 5000 digits": (b'{"input_ids": [[' + b"9" * 5000 + b"]]}", JSON),
    "an HTML page": (b'{"text": "a"}', {"content-type": "text/html"}),
    "a form": (b"text=a", {"content-type": "application/x-www-form-urlencoded"}),
    "multipart without boundary": (b"text=a", {"content-type": "multipart/form-data"}),
    "invalid content type": (b'{"text": "a"}', {"content-type": "\x7f"}),
}


def assert_client_error(answer: httpx.Response, *allowed: int) -> str:
    assert answer.status_code in (allowed or (400, 413, 415, 422)), answer.text
    content = answer.json()
    assert content.keys() == {"detail"}
    assert isinstance(content["detail"], str)
    assert content["detail"]
    return content["detail"]


@pytest.mark.parametrize("kind", BAD_DOCUMENTS)
def test_bad_document_gets_reason(kind: str, client: httpx.Client) -> None:
    body = json.dumps(BAD_DOCUMENTS[kind]).encode()
    assert_client_error(client.post("/infer", content=body, headers=JSON), 422)
    assert client.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'\xef\xbb\xbf{"text": "a"}', "Remove the byte order mark"),
        (
            b'["a"]',
            "The body must be a JSON object, got an array. "
            "Send an object with the fields text, texts, text_pair, input_ids, "
            "input_features, inputs.",
        ),
    ],
)
def test_json_fault_is_named(body: bytes, reason: str, client: httpx.Client) -> None:
    assert reason in assert_client_error(client.post("/infer", content=body, headers=JSON), 422)


@pytest.mark.parametrize("text", ["a\ud800", "a\ud800b", "\udfffa", "\ud800\u0041"])
def test_lone_surrogate_is_named(text: str, client: httpx.Client) -> None:
    for body in ({"text": text}, {"texts": ["a", text]}):
        content = json.dumps(body).encode()
        detail = assert_client_error(client.post("/infer", content=content, headers=JSON), 422)
        assert "half a surrogate pair" in detail


@pytest.mark.parametrize("kind", BAD_BODIES)
def test_bad_body_gets_reason(kind: str, client: httpx.Client) -> None:
    body, headers = BAD_BODIES[kind]
    assert_client_error(client.post("/infer", content=body, headers=headers))


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a" * 6001},
        {"texts": ["a", "a" * 6001]},
        {"input_ids": [[1], [1] * 6001]},
    ],
    ids=["text", "texts", "input_ids"],
)
def test_too_long_document_is_refused(body: dict[str, object], client: httpx.Client) -> None:
    detail = assert_client_error(client.post("/infer", json=body), 413)
    assert "6001" in detail
    assert "6000" in detail
    if "text" not in body:
        assert "document 1" in detail


@pytest.mark.parametrize(("entry", "remedy"), [(1, "in their own list"), ([1], "several requests")])
def test_excess_entries_get_remedy(entry: object, remedy: str, client: httpx.Client) -> None:
    body = {"input_ids": [entry] * 3000}
    assert remedy in assert_client_error(client.post("/infer", json=body), 413)


def test_longest_allowed_document_is_answered(client: httpx.Client) -> None:
    answer = client.post("/infer", json={"text": "a" * 6000})
    assert answer.status_code == 200
    assert answer.json()["tokens_used"] == 6000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/infer", 405),
        ("PUT", "/infer", 405),
        ("POST", "/healthz", 405),
        ("GET", "/x", 404),
        ("POST", "/infer/", 404),  # no redirect
    ],
)
def test_wrong_method_or_path_gets_json(
    method: str, path: str, status: int, client: httpx.Client
) -> None:
    assert_client_error(client.request(method, path), status)


SOME = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
text = st.text(st.characters(codec=None), max_size=20)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | text
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
)
requests = anything | st.dictionaries(
    st.sampled_from(["text", "texts", "input_ids", "lengths"]),
    anything | st.lists(text) | st.lists(st.lists(st.integers(-1, 301))),
    max_size=2,
)


@given(body=requests)
@SOME
def test_arbitrary_json_is_answered_or_refused(body: object, client: httpx.Client) -> None:
    content = json.dumps(body).encode()
    answer = client.post("/infer", content=content, headers=JSON)
    if answer.status_code != 200:
        assert_client_error(answer)


@given(body=st.binary(max_size=60))
@SOME
def test_arbitrary_bytes_are_refused(body: bytes, client: httpx.Client) -> None:
    assert_client_error(client.post("/infer", content=body, headers=JSON))


@pytest.mark.parametrize(
    ("path", "known", "remedy"),
    [
        ("/infer?evidnce=3", "explain, outputs, evidence", "Write evidence."),
        ("/infer?evidence=3&Outputs=label", "explain, outputs, evidence", "Write outputs."),
        ("/infer?x=1", "explain, outputs, evidence", "Leave it out."),
        ("/models/model/infer?output=a", "explain, outputs, evidence", "Write outputs."),
        ("/v2/models/model/infer?evidence=3", "no query parameter", "Leave it out."),
        ("/v2/models/model/versions/1/infer?outputs=a", "no query parameter", "Leave it out."),
        ("/parity?evidence=3", "no query parameter", "Leave it out."),
    ],
)
def test_unknown_query_parameter_is_refused(
    client: httpx.Client, path: str, known: str, remedy: str
) -> None:
    answer = client.post(path, json={"text": "a"})
    problem = answer.json().get("detail") or answer.json()["error"]
    assert answer.status_code == 422
    assert known in problem
    assert problem.endswith(remedy)


@pytest.mark.parametrize("path", ["/info", "/openapi.json", "/v2", "/v1/models"])
def test_description_takes_no_query(client: httpx.Client, path: str) -> None:
    answer = client.get(path, params={"verbose": "1"})
    assert (answer.status_code, "no query parameter" in answer.text) == (422, True)


def test_size_of_no_passage_is_refused(client: httpx.Client) -> None:
    answer = client.post("/infer?evidence_tokens=64", json={"text": "a"})
    assert "Add evidence, such as evidence=3" in assert_client_error(answer, 422)


@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson"])
@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ({"evidence": 3}, "Put it into the address: ?evidence=3."),
        ({"explain": ["invoice"]}, "Put it into the address: ?explain=VALUE."),
        ({"deadline_seconds": 3}, "Send it as the header Deadline-Seconds."),
        ({"evidense": 3}, "Fields are text, "),
    ],
)
def test_option_in_body_gets_its_place(
    client: httpx.Client, kind: str, field: dict[str, object], remedy: str
) -> None:
    body = json.dumps({"text": "a", **field})
    answer = client.post("/infer", content=body, headers={"content-type": kind})
    assert remedy in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/infer", {"input_ids": [1, 2]}, "[documents, tokens], got 1; add one level"),
        ("/infer", {"input_ids": [[1], [[2]]]}, "input_ids.1: expected 2 levels of brackets"),
        ("/infer", {"input_features": [[1.0, 2.0]]}, "got 2; add one level"),
        ("/parity", {"input_ids": [[1, 2]]}, "[tokens], got 2; remove one level"),
        ("/parity", {"input_ids": [[1] * 9] * 9}, "[tokens], got 2; remove one level"),
        ("/parity", {"input_features": [1.0]}, "[tokens, features], got 1; add one level"),
    ],
)
def test_wrong_brackets_are_counted(
    client: httpx.Client, path: str, body: dict[str, object], said: str
) -> None:
    assert said in assert_client_error(client.post(path, json=body), 422)


def test_probes_take_any_query(client: httpx.Client) -> None:
    for path in ("/healthz", "/readyz", "/v2/health/ready"):
        assert client.get(path, params={"verbose": "1"}).status_code == 200
