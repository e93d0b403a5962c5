"""``aftserve batch`` on a local Ray: its answers, and runs that fail or are ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import commands
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered_bundles import always
from clients import eventually
from commands import environment, run_python
from load.documents import bare_engine, make_documents
from ray_cluster import kill, processes
from sampling import any_case
from text_folders import write_texts

from aftexport.parity import TOLERANCES

BOUND = TOLERANCES["fp32"].bound
WORKER = r"^ray::MapWorker\S*\.submit"
"""Title that Ray gives a process that answers documents."""
ROW = {
    "id", "label", "scores", "tokens_total", "tokens_used", "truncated", "policy", "bundle",
    "error",
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(bundle_folder: Path) -> list[str]:
    documents = make_documents(bare_engine(bundle_folder, 1), 300, shortest=1, longest=3000)
    return [document.text for document in documents]


@pytest.fixture
def many() -> int:
    """Number of documents whose run takes seconds."""
    return 8000


def run_batch(ray: dict[str, str], folder: Path, *words: str | Path) -> commands.Outcome:
    return run_python("-m", "aftserve", "batch", *words, cwd=folder, **ray)


def assert_answered(row: dict[str, Any], answer: dict[str, Any]) -> None:
    """Assert that a row equals the server's answer."""
    assert row.keys() == ROW
    assert row["error"] is None
    assert row["scores"] == pytest.approx(answer["scores"], abs=BOUND)
    same = ROW - {"id", "error", "scores"}
    assert {name: row[name] for name in same} == {name: answer[name] for name in same}


def test_folder_rows_equal_server_answers(
    ray: dict[str, str], bundle_folder: Path, texts: list[str], client: httpx.Client, tmp_path: Path
) -> None:
    marked = [b"\xef\xbb\xbf" + texts[0].encode(), *texts[1:]]  # a byte order mark
    place = write_texts([*marked, b"\xff\xfe", ""], tmp_path / "documents")
    (place / ".hidden").write_text("not a document")
    (place / "link").symlink_to(place / "0")
    (place / "link to nothing").symlink_to("absent")
    Path(os.fsdecode(os.fsencode(place) + b"/\xe9.txt")).write_text(texts[0])
    outcome = run_batch(ray, tmp_path, bundle_folder, place, "--output", "out.jsonl")
    assert outcome.code == 3, outcome.err
    assert "305 documents" in outcome.err
    assert "4 of them without an answer" in outcome.err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    *rows, link, to_nothing, not_unicode = rows
    assert (link["id"], to_nothing["id"]) == ("link", "link to nothing")
    assert "directory" in link["error"]
    assert "No such file" in to_nothing["error"]
    assert_answered(not_unicode, client.post("/infer", json={"text": texts[0]}).json())
    assert not_unicode["id"] == r"\xe9.txt"
    assert [row["id"] for row in rows] == sorted(f"{n % 7}/{n:05}.txt" for n in range(302))
    by_number = {int(row["id"].split("/")[1][:5]): row for row in rows}
    for number, text in enumerate(texts):
        assert_answered(by_number[number], client.post("/infer", json={"text": text}).json())
    for number, message in {300: "UTF-8", 301: "no tokens"}.items():
        assert message in by_number[number]["error"]
        assert [by_number[number][name] for name in ("label", "scores", "truncated")] == [None] * 3


def test_parquet_rows_keep_their_order(
    ray: dict[str, str], bundle_folder: Path, texts: list[str], client: httpx.Client, tmp_path: Path
) -> None:
    columns = {"body": [*texts, None], "name": [f"document {n}" for n in range(301)]}
    for number, start in enumerate((0, 200)):
        part = pa.table({name: column[start:][:200] for name, column in columns.items()})
        part = part.set_column(0, "body", part["body"].dictionary_encode())
        folder = tmp_path / "parts" / f"body={number}"  # Hive reads a column value from such a name
        folder.mkdir(parents=True)
        pq.write_table(part, folder / "part.parquet", row_group_size=70)
    words = ["--text", "body", "--id", "name", "--actors", "2"]
    outcome = run_batch(ray, tmp_path, bundle_folder, "parts", "--output", "out.parquet", *words)
    assert outcome.code == 3, outcome.err
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["id"] for row in rows] == columns["name"]
    for text, row in zip(texts, rows, strict=False):
        assert_answered(row, client.post("/infer", json={"text": text}).json())
    assert "no text" in rows[300]["error"]


HANDLING_SIGINT = """
import signal, sys
from aftserve.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""
"""A shell starts background processes with SIGINT ignored; their children inherit that."""


@contextmanager
def running_batch(
    ray: dict[str, str], bundle: Path, folder: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a run over many documents once it has written some answers."""
    words = ["batch", str(bundle), "documents", "--output", "out.parquet"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", HANDLING_SIGINT, *words], cwd=folder, env=environment(**ray),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip

    def writes() -> bool:
        # The command first makes and removes a folder of such a name, to test the place.
        with suppress(FileNotFoundError):
            return any(p.is_file() and p.stat().st_size > 1000 for p in folder.glob(".out*"))
        return False

    try:
        eventually(lambda: process.poll() is not None or writes(), "the run writes")
        assert process.poll() is None, (folder / "log").read_text()
        yield process
    finally:
        process.kill()
        process.wait(60)


def kill_workers(ray: dict[str, str]) -> bool:
    """Kill the processes that answer; return whether there was one, even if it was ending."""
    found = processes(f"RAY_AUTH_TOKEN={ray['RAY_AUTH_TOKEN']}", WORKER)
    for number in found:
        with suppress(ProcessLookupError):
            kill(number)
    return found != []


def test_killed_worker_loses_no_document(
    ray: dict[str, str], bundle_folder: Path, many: int, tmp_path: Path
) -> None:
    write_texts(["a long document ..." * 20] * many, tmp_path / "documents")
    with running_batch(ray, bundle_folder, tmp_path) as process:
        eventually(lambda: kill_workers(ray), "a worker is killed")
        assert process.wait(120) == 0, (tmp_path / "log").read_text()
    out = pq.read_table(tmp_path / "out.parquet")
    assert out["error"].null_count == out.num_rows == many
    assert len(set(out["id"].to_pylist())) == many


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize("end", ["killed workers", "SIGINT", "SIGTERM"])
def test_aborted_run_keeps_previous_output(
    end: str, ray: dict[str, str], bundle_folder: Path, many: int, tmp_path: Path
) -> None:
    write_texts(["a long document ..." * 20] * many, tmp_path / "documents")
    (tmp_path / "out.parquet").write_text("earlier")
    with running_batch(ray, bundle_folder, tmp_path) as process:
        if signalled := end.startswith("SIG"):
            process.send_signal(signal.Signals[end])
        else:
            eventually(
                lambda: not kill_workers(ray) and process.poll() is not None, "the run gives up"
            )
        status, log = process.wait(60), (tmp_path / "log").read_text()
    assert status == (128 + signal.Signals[end] if signalled else 1), log
    assert (tmp_path / "out.parquet").read_text() == "earlier"
    assert not list(tmp_path.glob(".*"))


TERMINATED_AT_START = """
import os, signal, sys, time
from aftexport.system.process import exit_status
from aftserve.ray.cluster import connected, resolve

address = resolve(None)
import ray
init = ray.init

def init_and_terminate(**options):
    init(**options)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

ray.init = init_and_terminate
try:
    with connected(address, object_store_mib=80, logs=False):
        pass
except KeyboardInterrupt as end:
    sys.exit(exit_status(end))
"""


def test_sigterm_during_ray_start_ends_run(ray: dict[str, str], tmp_path: Path) -> None:
    outcome = run_python("-c", TERMINATED_AT_START, cwd=tmp_path, **ray)
    assert outcome.code == 143, outcome.err
    assert "SIGTERM received" not in outcome.err  # the message of a handler that may abort


LIMITED_FILES = """
import resource, sys
from aftserve.cli import main
from aftserve.batch import run

connected = run.connected

def connected_with_limit(*words, **options):
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
    return connected(*words, **options)

run.connected = connected_with_limit
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("kind", "count"),
    [("jsonl", 1), ("parquet", 300)],  # written at the end, and in parts
)
def test_oversized_output_keeps_previous_file(
    kind: str, count: int, ray: dict[str, str], bundle_folder: Path, tmp_path: Path
) -> None:
    write_texts(["a document"] * count, tmp_path / "documents")
    (tmp_path / f"out.{kind}").write_text("earlier")
    words = ("batch", str(bundle_folder), "documents", "--output", f"out.{kind}")
    outcome = run_python("-c", LIMITED_FILES, *words, cwd=tmp_path, **ray)
    assert outcome.code == 1, outcome.err
    assert f"--output out.{kind} cannot be written (File too large)" in outcome.err
    assert "ulimit -f" in outcome.err
    assert "Traceback" not in outcome.err
    assert (tmp_path / f"out.{kind}").read_text() == "earlier"
    assert {path.name for path in tmp_path.iterdir()} == {"documents", f"out.{kind}"}


def test_full_disk_keeps_previous_output(
    ray: dict[str, str], bundle_folder: Path, tmp_path: Path
) -> None:
    # Some file systems report a full disk only when a file is synchronized.
    full = "import aftexport.system.files, errno, os, sys; from aftserve.cli import main\n"
    full += "def fsync(_): raise OSError(errno.ENOSPC, 'full')\n"
    full += "os.fsync = fsync; sys.exit(main())"
    write_texts(["a document"], tmp_path / "documents")
    (tmp_path / "out.jsonl").write_text("earlier")
    words = ("batch", str(bundle_folder), "documents", "--output", "out.jsonl")
    outcome = run_python("-c", full, *words, cwd=tmp_path, **ray)
    assert outcome.code == 1, outcome.err
    assert "--output out.jsonl cannot be written (No space left on device)" in outcome.err
    assert "make room there" in outcome.err
    assert "Traceback" not in outcome.err
    assert (tmp_path / "out.jsonl").read_text() == "earlier"
    assert {path.name for path in tmp_path.iterdir()} == {"documents", "out.jsonl"}


def test_bundle_outside_tolerance_writes_no_output(
    ray: dict[str, str], bundle_copy: Path, tmp_path: Path
) -> None:
    write_texts(["a"], tmp_path / "documents")
    outcome = run_batch(ray, tmp_path, always(bundle_copy), "documents", "--output", "out.jsonl")
    assert outcome.code == 1, outcome.err
    assert "golden" in outcome.err
    assert not (tmp_path / "out.jsonl").exists()
