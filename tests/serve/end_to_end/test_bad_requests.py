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
    "text a number": {"text": 5},
    "text a list": {"text": ["a"]},
    "text empty": {"text": ""},
    "text a lone surrogate": {"text": "a\ud800b"},
    "texts a text": {"texts": "ab"},
    "texts empty": {"texts": []},
    "texts with an empty one": {"texts": ["a", ""]},
    "texts with null": {"texts": ["a", None]},
    "texts nested": {"texts": [["a"]]},
    "texts with a lone surrogate": {"texts": ["a", "\udfff"]},
    "ids flat": {"input_ids": [1, 2]},
    "ids empty": {"input_ids": []},
    "ids of an empty document": {"input_ids": [[1], []]},
    "ids nested": {"input_ids": [[[1]]]},
    "ids null": {"input_ids": [None]},
    "ids an object": {"input_ids": {"0": [1]}},
    "id past the vocabulary": {"input_ids": [[1, 300]]},
    "id negative": {"input_ids": [[-1]]},
    "id a float": {"input_ids": [[1.5]]},
    "id a fraction": {"input_ids": [[1.5]]},
    "id not a number": {"input_ids": [[float("nan")]]},
    "id infinite": {"input_ids": [[float("inf")]]},
    "id a truth value": {"input_ids": [[True]]},
    "id a digit": {"input_ids": [["1"]]},
    "id just past int64": {"input_ids": [[1 << 63]]},
    "id huge": {"input_ids": [[10**30]]},
}

BAD_BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    "empty": (b"", JSON),
    "no JSON": (b"hello", JSON),
    "JSON cut": (b'{"text": "a', JSON),
    "not UTF-8": (b'{"text": "\xff\xfe"}', JSON),
    "not UTF-8, overlong": (b'{"text": "\xc0\xaf"}', JSON),
    "not UTF-8, a surrogate": (b'{"text": "\xed\xa0\x80"}', JSON),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), JSON),
    "UTF-16 that says so": (
        '{"text": "a"}'.encode("utf-16-le"),
        {"content-type": "application/json; charset=utf-16le"},
    ),
    "Latin-1 that says so": (
        '{"text": "ä"}'.encode("latin-1"),
        {"content-type": "application/json; charset=latin-1"},
    ),
    "UTF-8 after a byte order mark": (b'\xef\xbb\xbf{"text": "a"}', JSON),
    "compressed": (gzip.compress(b'{"text": "a"}'), JSON | {"content-encoding": "gzip"}),
    "compressed as it says": (b'{"text": "a"}', JSON | {"content-encoding": "br"}),
    "NaN": (b"NaN", JSON),
    "NaN in place of a text": (b'{"text": NaN}', JSON),
    "infinity": (b'{"input_ids": [[-Infinity]]}', JSON),
    "a number past every float": (b'{"input_ids": [[1e999]]}', JSON),
    "a control character": (b'{"text": "\x01"}', JSON),
    "half an escape": (b'{"text": "\\ud8"}', JSON),
    "two values": (b'{"text": "a"} {"text": "b"}', JSON),
    "objects nested beyond measure": (b'{"text":' * 100_000, JSON),
    "an unknown field nested beyond measure": (
        b'{"x":' + b'{"a":' * 9999 + b"1" + b"}" * 10_000,
        JSON,
    ),
    "nested beyond measure": (b"[" * 100_000, JSON),
    "ids nested beyond measure": (b'{"input_ids":' + b"[" * 9999 + b"]" * 9999 + b"}", JSON),
    "number of 5000 digits": (b'{"input_ids": [[' + b"9" * 5000 + b"]]}", JSON),
    "a page": (b'{"text": "a"}', {"content-type": "text/html"}),
    "a form": (b"text=a", {"content-type": "application/x-www-form-urlencoded"}),
    "multipart without boundary": (b"text=a", {"content-type": "multipart/form-data"}),
    "content type no type": (b'{"text": "a"}', {"content-type": "\x7f"}),
}


def assert_client_error(answer: httpx.Response, *allowed: int) -> str:
    assert answer.status_code in (allowed or (400, 413, 415, 422)), answer.text
    content = answer.json()
    assert content.keys() == {"detail"}
    assert isinstance(content["detail"], str)
    assert content["detail"]
    return content["detail"]


@pytest.mark.parametrize("kind", BAD_DOCUMENTS)
def test_a_bad_request_gets_a_reason(kind: str, client: httpx.Client) -> None:
    body = json.dumps(BAD_DOCUMENTS[kind]).encode()
    assert_client_error(client.post("/infer", content=body, headers=JSON), 422)
    assert client.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'\xef\xbb\xbf{"text": "a"}', "Remove the byte order mark"),
        (
            b'["a"]',
            "The body must be a JSON object, got an array. "
            "Send an object with the fields text, texts, input_ids.",
        ),
    ],
)
def test_what_is_wrong_with_the_json_is_said(body: bytes, said: str, client: httpx.Client) -> None:
    assert said in assert_client_error(client.post("/infer", content=body, headers=JSON), 422)


@pytest.mark.parametrize("text", ["a\ud800", "a\ud800b", "\udfffa", "\ud800\u0041"])
def test_half_a_surrogate_pair_is_named(text: str, client: httpx.Client) -> None:
    for body in ({"text": text}, {"texts": ["a", text]}):
        content = json.dumps(body).encode()
        said = assert_client_error(client.post("/infer", content=content, headers=JSON), 422)
        assert "half a surrogate pair" in said


@pytest.mark.parametrize("kind", BAD_BODIES)
def test_a_body_that_is_no_json_gets_a_reason(kind: str, client: httpx.Client) -> None:
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
def test_a_document_too_long_is_refused_not_cut(
    body: dict[str, object], client: httpx.Client
) -> None:
    detail = assert_client_error(client.post("/infer", json=body), 413)
    assert "6001" in detail
    assert "6000" in detail
    if "text" not in body:
        assert "document 1" in detail


@pytest.mark.parametrize(("entry", "remedy"), [(1, "in their own list"), ([1], "several requests")])
def test_of_many_entries_it_says_what_to_do(
    entry: object, remedy: str, client: httpx.Client
) -> None:
    body = {"input_ids": [entry] * 3000}
    assert remedy in assert_client_error(client.post("/infer", json=body), 413)


def test_a_document_exactly_as_long_as_allowed_is_answered(client: httpx.Client) -> None:
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
def test_a_wrong_method_or_path_gets_json_too(
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
