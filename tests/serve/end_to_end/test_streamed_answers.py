"""Answers for tokens of long documents: bounded memory, slow readers, clients that leave."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import served_heads
from clients import eventually, head, http, metric, raw_connection
from memory import MIB, NEEDS_PROC
from servers import serving

TOKENS = 200_000
BUDGET_MIB = 32
"""The document runs in chunks within this budget."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streamed")


@pytest.fixture(scope="module")
def server(folder: Path, heads_bundle: Path) -> Iterator[tuple[str, int]]:
    options = ["--memory-budget-mib", str(BUDGET_MIB), "--spill", str(folder)]
    options += ["--idle-seconds", "0"]
    with serving(heads_bundle, folder / "log", *options, measured=True) as (address, process):
        yield address, process.pid
    assert "Traceback" not in (folder / "log").read_text("utf-8")


@pytest.fixture(scope="module")
def document() -> str:
    letters = np.random.default_rng(7).integers(ord("a"), ord("z"), TOKENS - 4)
    return bytes(letters.astype(np.uint8)).decode() + "😀"


def anonymous_mib(process: int) -> float:
    """Return the memory of a process without mapped files."""
    status = Path(f"/proc/{process}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024 / MIB


def mapped_files(process: int, folder: Path) -> int:
    """Return how many files without a name the process has mapped from a folder."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return sum(str(folder) in line and line.endswith("(deleted)") for line in lines)


@contextmanager
def streaming(address: str, text: str, *headers: str) -> Iterator[socket.socket]:
    """Send a document, and yield the connection once the first bytes of its answer have arrived."""
    body = text.encode()
    top = head(len(body), "Accept: application/x-ndjson", *headers)
    with raw_connection(address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.sendall(top.replace(b"application/json", b"text/plain") + body)
        connection.settimeout(120)
        assert connection.recv(17) == b"HTTP/1.1 200 OK\r\n"
        yield connection


@pytest.mark.slow
def test_long_answer_is_that_of_pytorch(server: tuple[str, int], document: str) -> None:
    expected = served_heads.outputs(list(document.encode()))
    scores = expected["tags"].softmax(1)
    names = np.array(served_heads.TAGS)[scores.argmax(1).numpy()]
    headers = {"Accept": "application/x-ndjson", "Content-Type": "text/plain"}
    ends, rows, spans = {"tags": 0, "vectors": 0}, np.zeros((TOKENS, 4)), 0
    with http.stream(
        "POST", f"{server[0]}/infer", content=document.encode(), headers=headers, timeout=240
    ) as answer:
        assert answer.status_code == 200
        lines = (json.loads(line) for line in answer.iter_lines())
        assert next(lines)["tokens_used"] == TOKENS
        count = 1
        for line in lines:
            if "complete" in line:
                break
            count += 1
            if "spans" in line:
                spans += len(line["spans"])
                assert all(document[s["start"] : s["end"]] == s["text"] for s in line["spans"])
                continue
            own = slice(line["start_token"], line["start_token"] + 4096)
            assert line["start_token"] == ends[line["head"]]
            if line["head"] == "tags":
                sure = np.diff(np.sort(scores[own].numpy(), 1)[:, -2:], axis=1)[:, 0] > 1e-3
                assert (np.array(line["labels"]) == names[own])[sure].all()
                np.testing.assert_allclose(line["scores"], scores[own].amax(1), atol=1e-4)
                ends["tags"] += len(line["labels"])
            else:
                rows[own] = line["vectors"]
                ends["vectors"] += len(line["vectors"])
        assert line == {"complete": True, "lines": count}
        assert next(lines, None) is None
    assert ends == {"tags": TOKENS, "vectors": TOKENS}
    np.testing.assert_allclose(rows, expected["vectors"], rtol=1e-3, atol=1e-3)
    assert spans > 1000


@NEEDS_PROC
def test_memory_is_flat_while_streaming(server: tuple[str, int], document: str) -> None:
    address, process = server
    with streaming(address, document) as connection:
        first = most = anonymous_mib(process)
        received = 0
        while part := connection.recv(1 << 18):
            received += len(part)
            most = max(most, anonymous_mib(process))
            if b'"complete"' in part:
                break
    assert received > 30 * MIB
    assert most - first < 12


@NEEDS_PROC
def test_leaving_client_frees_its_answer(
    server: tuple[str, int], document: str, folder: Path
) -> None:
    address, process = server
    with streaming(address, document) as connection:
        connection.recv(1 << 16)
        assert mapped_files(process, folder) >= 1
        first = anonymous_mib(process)
        time.sleep(1)  # a client that reads nothing must not make the server go on
        assert anonymous_mib(process) - first < 12
    eventually(lambda: mapped_files(process, folder) == 0, "the files of the answer are closed")
    answer = http.post(f"{address}/infer", json={"text": "a"}, timeout=60)
    assert answer.status_code == 200


def test_short_requests_are_answered_meanwhile(server: tuple[str, int], document: str) -> None:
    address, _ = server
    with streaming(address, document) as connection:
        connection.recv(1 << 16)
        for _ in range(3):
            assert http.post(f"{address}/infer", json={"text": "a"}, timeout=60).status_code == 200
        assert metric(address, "aftserve_running_documents") == 0


def test_full_disk_fails_only_its_document(
    heads_bundle: Path, tmp_path: Path, document: str
) -> None:
    program = (
        "-c",
        "import resource, sys\n"
        "from aftserve.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_200_000, 1_200_000))\n"
        "sys.exit(main())\n",
    )
    with serving(heads_bundle, tmp_path / "log", program=program) as (address, _):
        content, kind = document.encode(), {"Content-Type": "text/plain"}
        headers = kind | {"Accept": "application/x-ndjson"}
        refused = http.post(f"{address}/infer", content=content, headers=headers, timeout=240)
        assert refused.status_code == 507, refused.text
        assert "--spill" in refused.json()["detail"]
        assert http.post(f"{address}/infer", json={"text": "a"}).status_code == 200
