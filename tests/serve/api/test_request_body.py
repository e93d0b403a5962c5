"""Bodies within the byte limit that try to use as much time and memory as possible."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from clients import http, metric
from pydantic import BaseModel
from servers import serving

from aftexport.errors import InputError
from aftserve.api.request_body import parse
from aftserve.errors import DocumentTooLongError
from aftserve.schemas import InferRequest

MIB = 1 << 20
COUNT = 1 << 19


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
}


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


def test_hostile_bodies_leave_memory_unchanged(server: tuple[str, int]) -> None:
    address, process = server

    def resident_after_all() -> float:
        for kind, body in HOSTILE.items():
            answer = http.post(
                f"{address}/infer", content=body, headers={"content-type": "application/json"},
                timeout=60,
            )  # fmt: skip
            assert answer.status_code in (413, 422), kind
            assert 0 < len(answer.json()["detail"]) < 500, kind
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


class Question(BaseModel):
    words: list[str]


def test_list_limit_is_exact() -> None:
    assert parse(b'{"words": ["a", "b"]}', Question, {"words": 2}).words == ["a", "b"]
    with pytest.raises(DocumentTooLongError, match="words must have at most 2 entries, got 3"):
        parse(b'{"words": ["a", "b", "c"]}', Question, {"words": 2})


def test_error_names_only_first_fault() -> None:
    with pytest.raises(InputError, match="'k0'") as refusal:
        parse(b'{"k0": 1, "k1": 1}', InferRequest, {})
    assert "k1" not in str(refusal.value)


def test_error_shortens_long_field_name() -> None:
    with pytest.raises(InputError) as refusal:
        parse(b'{"' + b"a" * 10_000 + b'": 1}', InferRequest, {})
    assert len(str(refusal.value)) < 300
