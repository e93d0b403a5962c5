"""Bodies within the byte limit that try to use as much time and memory as possible."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import http, metric
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from servers import serving

from aftexport.errors import InputError
from aftserve.api.request_body import JSON, checked
from aftserve.errors import DocumentTooLongError
from aftserve.schemas import InferRequest

MIB = 1 << 20
COUNT = 1 << 17


def list_of(entry: bytes, name: bytes = b"input_ids") -> bytes:
    return b'{"%s":[' % name + (entry + b",") * (COUNT - 1) + entry + b"]}"


HOSTILE = {
    "faults of many documents": list_of(b"null"),
    "faults of many ids": b'{"input_ids":[[' + b"null," * COUNT + b"null]]}",
    "many empty documents": list_of(b"[]"),
    "many documents of one token": list_of(b"[1]"),
    "many texts": list_of(b'"a"', b"texts"),
    "many ids": b'{"input_ids":[[' + b"0," * (COUNT * 3) + b"0]]}",
    "many large ids": b'{"input_ids":[[' + b"65535," * COUNT + b"0]]}",
    "many unknown fields": b"{" + b",".join(b'"k%d":1' % i for i in range(COUNT // 2)) + b"}",
    "the same field many times": b"{" + b'"text":"",' * (COUNT // 2) + b'"text":1}',
    "many objects": list_of(b"{}"),
    "many escapes": b'{"texts":["' + b"\\u00e9" * COUNT + b'",1]}',
    "nested lists": list_of(b"[[[]]]", b"input_features"),
    "rows of one number": b'{"input_features":[[' + b"[1]," * COUNT + b"[1]]]}",
    "rows of two lengths": list_of(b"[1],[]", b"input_features"),
    "deep lists": b"[" * COUNT,
    "deep objects": b'{"a":' * COUNT,
    "objects of extra inputs": list_of(b'{"a":[{}]}', b"inputs"),
    "many keys": b'{"inputs":{' + b'"":1,' * COUNT + b'"":1}}',
    "white space": b" " * (8 * COUNT) + b"1",
}
TENSOR = b'{"inputs":[{"name":"input_ids","datatype":"INT64","shape":[1,1],%s}]}'
HOSTILE_TENSORS = {
    "many empty rows": TENSOR % (b'"data":[' + b"[]," * COUNT + b"[]]"),
    "many ids": TENSOR % (b'"data":[' + b"1," * COUNT + b"1]"),
    "many texts": TENSOR % (b'"data":[' + b'"",' * COUNT + b'""]'),
    "many parameters": TENSOR % (b'"data":[1],"parameters":{"x":[' + b"{}," * (3 * COUNT) + b"1]}"),
    "many faults of a shape": b'{"inputs":[{"shape":[' + b"null," * (COUNT // 4) + b"1]}]}",
    "many faults of inputs": b'{"inputs":[' + b"1," * (COUNT // 4) + b"1]}",
}
"""Bodies of the Open Inference Protocol."""


@pytest.fixture(scope="module")
def server(
    bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int]]:
    """Yield the address and the process ID of a server."""
    log = tmp_path_factory.mktemp("bodies") / "log"
    with serving(bundle_folder, log, "--max-tokens", "6000", measured=True) as (address, process):
        yield address, process.pid
    assert "Traceback" not in log.read_text("utf-8")


def peak_mib(process: int) -> float:
    """Return the peak of resident memory since the last call, in MiB."""
    status = Path(f"/proc/{process}/status").read_text()
    Path(f"/proc/{process}/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.slow
def test_hostile_bodies_leave_memory_unchanged(server: tuple[str, int]) -> None:
    address, process = server

    def resident_after_all() -> float:
        bodies = {kind: ("/infer", body) for kind, body in HOSTILE.items()}
        bodies |= {k: ("/v2/models/model/infer", body) for k, body in HOSTILE_TENSORS.items()}
        for kind, (path, body) in bodies.items():
            answer = http.post(
                f"{address}{path}", content=body, headers={"content-type": "application/json"},
                timeout=60,
            )  # fmt: skip
            assert answer.status_code in (413, 422), kind
            assert 0 < len(answer.text) < 500, kind
            assert peak_mib(process) - resting < 128, kind
        return metric(address, "process_resident_memory_bytes") / MIB

    resting = metric(address, "process_resident_memory_bytes") / MIB
    peak_mib(process)
    for _ in range(2):  # let the allocator settle
        before = resident_after_all()
    assert resident_after_all() - before < 16
    assert http.get(f"{address}/readyz").status_code == 200


def test_empty_rows_take_no_memory(server: tuple[str, int]) -> None:
    address, process = server
    tensor = {"name": "input_ids", "shape": [1 << 22, 0], "datatype": "INT64", "data": []}
    before = metric(address, "process_resident_memory_bytes") / MIB
    peak_mib(process)
    answer = http.post(f"{address}/v2/models/model/infer", json={"inputs": [tensor]}, timeout=60)
    assert answer.status_code == 413
    assert peak_mib(process) - before < 128


def test_large_bodies_leave_turns_to_others(server: tuple[str, int]) -> None:
    """While seven bodies of a million ids are parsed, the server answers others again and again."""
    address, _ = server
    body = b'{"input_ids":[[' + b"1," * (1 << 20) + b"1]]}"
    headers = {"content-type": "application/json"}
    with ThreadPoolExecutor(7) as pool:
        answers = [
            pool.submit(http.post, f"{address}/infer", content=body, headers=headers)
            for _ in range(7)
        ]
        beats = 0
        while not all(answer.done() for answer in answers):
            assert http.get(f"{address}/healthz").status_code == 200
            beats += 1
    assert {answer.result().status_code for answer in answers} <= {413, 429}
    assert beats > 20


def test_many_short_texts_leave_turns_to_others(server: tuple[str, int]) -> None:
    address, _ = server
    json_lines = b'{"text":"a"}\n' * 256
    with ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(http.post, f"{address}/infer", **form)
            for form in [
                {"json": {"texts": ["a"] * 256}},
                {"content": json_lines, "headers": {"content-type": "application/x-ndjson"}},
            ]
            * 4
        ]
        beats = 0
        while not all(answer.done() for answer in answers):
            assert http.get(f"{address}/healthz").status_code == 200
            beats += 1
    assert {answer.result().status_code for answer in answers} == {200}
    assert beats > 20
    whole = answers[0].result().json()["results"]
    lines = [json.loads(line) for line in answers[1].result().text.splitlines()]
    assert [one["scores"] for one in whole] == [one["scores"] for one in lines]


def test_large_ids_have_answers_of_small_ones(server: tuple[str, int]) -> None:
    """A body over 8 KiB has one array in place of equal rows, or an array for each row."""
    address, _ = server
    documents = [[(7 * i + j) % 250 for i in range(5900)] for j in range(2)] + [
        [1, 2, 3],
        [4, 5, 6],
    ]

    def scores(path: str, **body: object) -> Any:
        answer = http.post(f"{address}{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def infer(ids: list[Any]) -> Any:
        results = scores("/infer", input_ids=ids)["results"]
        return np.array([[*one["scores"].values()] for one in results])

    expected = infer(documents)
    assert infer(documents[:2]) == pytest.approx(expected[:2], abs=1e-6)
    assert infer(documents[2:]) == pytest.approx(expected[2:], abs=1e-6)
    assert infer([[*map(float, documents[0])]]) == pytest.approx(expected[:1], abs=1e-6)
    flat = [*documents[0], *documents[1]]
    for data in (documents[:2], flat):
        tensor = {"name": "input_ids", "shape": [2, 5900], "datatype": "INT64", "data": data}
        (output,) = scores("/v2/models/model/infer", inputs=[tensor], outputs=[{"name": "scores"}])[
            "outputs"
        ]
        assert output["data"] == pytest.approx(expected[:2].ravel(), abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({9: 1.5}, "input_ids.0: "),
        ({9: math.inf}, "input_ids.0: "),
        ({9: True}, "input_ids.0.9: "),
        ({9: None}, "input_ids.0.9: "),
        ({9: 300}, "Token id 300 is outside the vocabulary."),
        ({9: -1}, "Token id -1 is outside the vocabulary."),
        ({9: 1 << 70}, "Token id 1180591620717411303424 is outside the vocabulary."),
        ({9: [1]}, "input_ids.0"),
    ],
)
def test_large_ids_are_checked(
    server: tuple[str, int], change: dict[int, object], message: str
) -> None:
    address, _ = server
    ids: list[object] = [1] * 5900
    for place, value in change.items():
        ids[place] = value
    body = json.dumps({"input_ids": [ids]}).replace("Infinity", "1e400")
    answer = http.post(f"{address}/infer", content=body, headers={"Content-Type": JSON})
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


class Question(BaseModel):
    words: list[str]


REQUEST = Request({"type": "http", "route": APIRoute("/", lambda: None)})


def test_list_limit_is_exact() -> None:
    assert checked({"words": ["a", "b"]}, Question, {"words": 2}, REQUEST).words == ["a", "b"]
    with pytest.raises(DocumentTooLongError, match="words must have at most 2 entries, got 3"):
        checked({"words": ["a", "b", "c"]}, Question, {"words": 2}, REQUEST)


def test_error_names_only_first_fault() -> None:
    with pytest.raises(InputError, match="'k0'") as refusal:
        checked({"k0": 1, "k1": 1}, InferRequest, {}, REQUEST)
    assert "k1" not in str(refusal.value)


def test_error_shortens_long_field_name() -> None:
    with pytest.raises(InputError) as refusal:
        checked({"a" * 10_000: 1}, InferRequest, {}, REQUEST)
    assert len(str(refusal.value)) < 300
