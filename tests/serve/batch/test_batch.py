"""``aftserve batch``: what ``/infer`` answers, for a folder or for Parquet, whole or not at all."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import commands
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from biased_model import always
from clients import eventually
from commands import assert_refused, environment, run_python, without
from load.documents import bare_engine, make_documents
from ray_cluster import kill, processes

from aftexport.parity import TOLERANCES
from aftserve.batch import documents, output
from aftserve.batch.answering import Outcome
from aftserve.cli import main

BOUND = TOLERANCES["fp32"].bound
AT_WORK = r"^ray::MapWorker\S*\.submit"
"""Ray titles a process by what it is at."""
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
    """Documents of a run that goes on for a while."""
    return 8000


def batch(ray: dict[str, str], folder: Path, *words: str | Path) -> commands.Outcome:
    return run_python("-m", "aftserve", "batch", *words, cwd=folder, **ray)


def folder_of(texts: Sequence[str | bytes], folder: Path) -> Path:
    for number, text in enumerate(texts):
        path = folder / f"{number % 7}" / f"{number:05}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def assert_answered(row: dict[str, Any], answer: dict[str, Any]) -> None:
    """Whether a row says what the server does."""
    assert row.keys() == ROW
    assert row["error"] is None
    assert row["scores"] == pytest.approx(answer["scores"], abs=BOUND)
    same = ROW - {"id", "error", "scores"}
    assert {name: row[name] for name in same} == {name: answer[name] for name in same}


def test_a_folder_is_answered_as_the_server_does_and_what_cannot_be_has_its_error(
    ray: dict[str, str], bundle_folder: Path, texts: list[str], client: httpx.Client, tmp_path: Path
) -> None:
    marked = [b"\xef\xbb\xbf" + texts[0].encode(), *texts[1:]]  # by a byte order mark
    place = folder_of([*marked, b"\xff\xfe", ""], tmp_path / "documents")
    (place / ".hidden").write_text("no document")
    (place / "link").symlink_to(place / "0")
    (place / "link to nothing").symlink_to("absent")
    Path(os.fsdecode(os.fsencode(place) + b"/\xe9.txt")).write_text(texts[0])
    outcome = batch(ray, tmp_path, bundle_folder, place, "--output", "out.jsonl")
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
    for number, said in {300: "UTF-8", 301: "no tokens"}.items():
        assert said in by_number[number]["error"]
        assert [by_number[number][name] for name in ("label", "scores", "truncated")] == [None] * 3


def test_parquet_is_answered_in_its_order(
    ray: dict[str, str], bundle_folder: Path, texts: list[str], client: httpx.Client, tmp_path: Path
) -> None:
    columns = {"body": [*texts, None], "name": [f"document {n}" for n in range(301)]}
    for number, start in enumerate((0, 200)):
        part = pa.table({name: column[start:][:200] for name, column in columns.items()})
        part = part.set_column(0, "body", part["body"].dictionary_encode())  # a category
        folder = tmp_path / "parts" / f"body={number}"  # Hive has a value of a column there
        folder.mkdir(parents=True)
        pq.write_table(part, folder / "part.parquet", row_group_size=70)
    words = ["--text", "body", "--id", "name", "--actors", "2"]
    outcome = batch(ray, tmp_path, bundle_folder, "parts", "--output", "out.parquet", *words)
    assert outcome.code == 3, outcome.err
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["id"] for row in rows] == columns["name"]
    for text, row in zip(texts, rows, strict=False):
        assert_answered(row, client.post("/infer", json={"text": text}).json())
    assert "no text" in rows[300]["error"]


HEEDING_SIGINT = """
import signal, sys
from aftserve.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""
"""What a shell starts in the background ignores it, and so does all that is started there."""


@contextmanager
def running(ray: dict[str, str], bundle: Path, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A run over many documents, once it has written some answers."""
    words = ["batch", str(bundle), "documents", "--output", "out.parquet"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", HEEDING_SIGINT, *words], cwd=folder, env=environment(**ray),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip

    def writes() -> bool:
        # At first a folder is made there, and removed, to see whether one can be.
        with suppress(FileNotFoundError):
            return any(p.is_file() and p.stat().st_size > 1000 for p in folder.glob(".out*"))
        return False

    try:
        eventually(lambda: process.poll() is not None or writes(), "it writes", seconds=120)
        assert process.poll() is None, (folder / "log").read_text()
        yield process
    finally:
        process.kill()
        process.wait(60)


def kill_at_work(ray: dict[str, str]) -> bool:
    """Kills the processes that answer; whether there was one, be it one that is dying already."""
    found = processes(f"RAY_AUTH_TOKEN={ray['RAY_AUTH_TOKEN']}", AT_WORK)
    for number in found:
        with suppress(ProcessLookupError):
            kill(number)
    return found != []


def test_a_process_that_dies_is_replaced_and_nothing_is_lost(
    ray: dict[str, str], bundle_folder: Path, many: int, tmp_path: Path
) -> None:
    folder_of(["a long document ..." * 20] * many, tmp_path / "documents")
    with running(ray, bundle_folder, tmp_path) as process:
        eventually(lambda: kill_at_work(ray), "it is killed")
        assert process.wait(120) == 0, (tmp_path / "log").read_text()
    out = pq.read_table(tmp_path / "out.parquet")
    assert out["error"].null_count == out.num_rows == many
    assert len(set(out["id"].to_pylist())) == many


@pytest.mark.parametrize("end", ["processes that die again and again", "SIGINT", "SIGTERM"])
def test_a_run_that_is_ended_leaves_what_was_there(
    end: str, ray: dict[str, str], bundle_folder: Path, many: int, tmp_path: Path
) -> None:
    folder_of(["a long document ..." * 20] * many, tmp_path / "documents")
    (tmp_path / "out.parquet").write_text("of before")
    with running(ray, bundle_folder, tmp_path) as process:
        if signalled := end.startswith("SIG"):
            process.send_signal(signal.Signals[end])
        else:
            eventually(lambda: not kill_at_work(ray) and process.poll() is not None, "it gives up")
        status, said = process.wait(60), (tmp_path / "log").read_text()
    assert status == (128 + signal.Signals[end] if signalled else 1), said
    assert (tmp_path / "out.parquet").read_text() == "of before"
    assert not list(tmp_path.glob(".*"))


TERMINATED_MEANWHILE = """
import os, signal, sys, time
from aftexport.system.signals import exit_status
from aftserve.ray.cluster import connected, resolve

address = resolve(None)
import ray
init = ray.init

def init_and_hear_of_it(**options):
    init(**options)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

ray.init = init_and_hear_of_it
try:
    with connected(address, object_store_mib=80, logs=False):
        pass
except KeyboardInterrupt as end:
    sys.exit(exit_status(end))
"""


def test_told_to_stop_while_ray_starts_it_ends_as_it_is_told(
    ray: dict[str, str], tmp_path: Path
) -> None:
    outcome = run_python("-c", TERMINATED_MEANWHILE, cwd=tmp_path, **ray)
    assert outcome.code == 143, outcome.err
    assert "SIGTERM received" not in outcome.err  # that was a handler which may abort


NOT_IN_TIME = """
import sys
from aftserve.cli import main
from aftserve.ray.cluster import resolve

resolve(None)
import ray

def init(**options):
    raise Exception("The current node timed out during startup.")

ray.init = init
sys.exit(main())
"""


def test_a_ray_that_does_not_start_in_time_is_named(bundle_folder: Path, tmp_path: Path) -> None:
    folder_of(["a"], tmp_path / "documents")
    words = ("batch", bundle_folder, "documents", "--output", "out.jsonl")
    outcome = run_python("-c", NOT_IN_TIME, *words, cwd=tmp_path)
    assert_refused(outcome, "Ray on this machine is not available", "timed out during startup")


SMALL_FILES = """
import resource, sys
from aftserve.cli import main
from aftserve.batch import run

connected = run.connected

def connected_and_limited(*words, **options):
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
    return connected(*words, **options)

run.connected = connected_and_limited
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("kind", "count"),
    [("jsonl", 1), ("parquet", 300)],  # written when it is closed, and before
)
def test_an_output_that_finds_no_room_is_named_and_leaves_what_was_there(
    kind: str, count: int, ray: dict[str, str], bundle_folder: Path, tmp_path: Path
) -> None:
    folder_of(["a document"] * count, tmp_path / "documents")
    (tmp_path / f"out.{kind}").write_text("of before")
    words = ("batch", str(bundle_folder), "documents", "--output", f"out.{kind}")
    outcome = run_python("-c", SMALL_FILES, *words, cwd=tmp_path, **ray)
    assert outcome.code == 1, outcome.err
    assert f"--output out.{kind} cannot be written (File too large)" in outcome.err
    assert "ulimit -f" in outcome.err
    assert "Traceback" not in outcome.err
    assert (tmp_path / f"out.{kind}").read_text() == "of before"
    assert {path.name for path in tmp_path.iterdir()} == {"documents", f"out.{kind}"}


def test_a_disk_that_is_full_once_the_rows_are_written_is_named(
    ray: dict[str, str], bundle_folder: Path, tmp_path: Path
) -> None:
    # Some file systems find room when a file is written out, and not before.
    full = "import aftexport.system.files, errno, os, sys; from aftserve.cli import main\n"
    full += "def fsync(_): raise OSError(errno.ENOSPC, 'as the system says')\n"
    full += "os.fsync = fsync; sys.exit(main())"
    folder_of(["a document"], tmp_path / "documents")
    (tmp_path / "out.jsonl").write_text("of before")
    words = ("batch", str(bundle_folder), "documents", "--output", "out.jsonl")
    outcome = run_python("-c", full, *words, cwd=tmp_path, **ray)
    assert outcome.code == 1, outcome.err
    assert "--output out.jsonl cannot be written (No space left on device)" in outcome.err
    assert "make room there" in outcome.err
    assert "Traceback" not in outcome.err
    assert (tmp_path / "out.jsonl").read_text() == "of before"
    assert {path.name for path in tmp_path.iterdir()} == {"documents", "out.jsonl"}


def test_a_bundle_outside_its_bound_answers_nothing(
    ray: dict[str, str], bundle_copy: Path, tmp_path: Path
) -> None:
    folder_of(["a"], tmp_path / "documents")
    outcome = batch(ray, tmp_path, always(bundle_copy), "documents", "--output", "out.jsonl")
    assert outcome.code == 1, outcome.err
    assert "golden" in outcome.err
    assert not (tmp_path / "out.jsonl").exists()


def test_without_ids_the_rows_are_numbered(tmp_path: Path) -> None:
    columns = output.schema(["yes", "no"], None)
    marks: Any = {"policy": "exact", "bundle": "digest"}
    with output.Writer(tmp_path / "out", Path("out.jsonl"), columns, numbered=True) as writer:
        for count in (2, 3):
            writer.write(output.table(None, [Outcome(error="no")] * count, columns, **marks))
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["id"] for row in rows] == [0, 1, 2, 3, 4]


def strings(*values: bytes) -> pa.Array:
    """As Parquet may have them: nothing has seen to it that they are UTF-8."""
    array = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        (pa.array([1.5, math.nan, -math.inf, None]), [1.5, None, None, None]),
        (pa.array([[1.0, math.nan], None]), [[1.0, None], None]),
        (pa.array([{"of": math.inf}]), [{"of": None}]),
        (pa.array([3, None]), [3, None]),
        (pa.array([True]), [True]),
        (strings("ä".encode(), b"\xff"), ["ä", r"\xff"]),
        (pa.array([b"a", b"\xff"]), ["a", r"\xff"]),
        (pa.array(["a", "b", "a", None]).dictionary_encode(), ["a", "b", "a", None]),
        (pa.array([1], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000001"]),
        (pa.array([253402300800], pa.timestamp("s")), ["10000-01-01 00:00:00"]),
        (pa.array([date(2024, 2, 29)]), ["2024-02-29"]),
        (pa.array([Decimal("1.10")]), ["1.10"]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_whatever_the_ids_are_the_lines_are_json(
    ids: pa.Array, shown: list[Any], tmp_path: Path
) -> None:
    columns = output.schema(["yes", "no"], ids.type)
    marks: Any = {"policy": "exact", "bundle": "digest"}
    rows = output.table(pa.chunked_array([ids]), [Outcome(error="no")] * len(ids), columns, **marks)
    path = tmp_path / "out.jsonl"
    with output.Writer(path, path, columns, numbered=False) as writer:
        writer.write(rows)

    def none(constant: str) -> None:
        raise AssertionError(constant)

    lines = path.read_text("utf-8").splitlines()
    assert [json.loads(line, parse_constant=none)["id"] for line in lines] == shown


def test_a_text_that_is_not_utf8_has_an_error_of_its_own() -> None:
    block = pa.table({"text": strings(b"a", b"a\xff", b"b")})
    one, broken, other = documents.texts_of(block, 100)
    assert (one, other) == ("a", "b")
    assert "not UTF-8 at byte 1" in str(broken)


def test_an_empty_path_is_not_taken_for_the_current_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["batch", "model.bundle", "", "--output", "out.jsonl"])
    assert "argument INPUT: the path is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent", "--output", "out.jsonl"], "absent"),
        (["empty", "--output", "out.jsonl"], "no documents"),
        (["documents", "--output", "out.csv"], "out.csv"),
        (["documents", "--output", "documents/out.jsonl"], "lies in the input"),
        (["documents", "--output", "empty.jsonl"], "is a folder"),
        (["table.parquet", "--output", "out.jsonl"], "'text'"),
        (["table.parquet", "--text", "number", "--output", "out.jsonl"], "int64"),
        (["table.parquet", "--text", "body", "--id", "x", "--output", "out.jsonl"], "'x'"),
        (["table.parquet", "--text", "body", "--id", "body", "--output", "out.jsonl"], "twice"),
        (["no.parquet", "--output", "out.jsonl"], "no.parquet"),
        (["lines.jsonl", "--output", "out.jsonl"], "must be Parquet"),
        (["mixed", "--text", "body", "--output", "out.jsonl"], "notes.txt"),
        (["unlike", "--text", "body", "--output", "out.jsonl"], "2.parquet must have one column"),
        (["unlike", "--text", "name", "--id", "number", "--output", "out.jsonl"], "double in"),
        (["documents", "--long-documents", "cut", "--output", "out.jsonl"], "--long-documents"),
        (["documents", "--output", "/proc/out.jsonl"], "/proc/out.jsonl"),
    ],
)
def test_what_cannot_be_run_is_refused_before_ray_is_asked(
    words: list[str], said: str, bundle_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    folder_of(["a"], tmp_path / "documents")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").mkdir()
    pq.write_table(pa.table({"body": ["a"], "number": [1]}), tmp_path / "table.parquet")
    (tmp_path / "no.parquet").write_text("no")
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}')
    for folder in ("mixed", "unlike"):
        (tmp_path / folder).mkdir()
        one = pa.table({"body": ["a"], "name": ["a"], "number": [1]})
        pq.write_table(one, tmp_path / folder / "1.parquet")
    (tmp_path / "mixed" / "notes.txt").write_text("notes")
    other = pa.table({"name": ["a"], "number": [1.5]})
    pq.write_table(other, tmp_path / "unlike" / "2.parquet")
    code = main(["batch", str(bundle_folder), *words])
    captured = capsys.readouterr()
    assert_refused(commands.Outcome(code, captured.out, captured.err), said)


@pytest.mark.parametrize("module", ["ray", "pyarrow"])
def test_without_ray_it_names_the_extra(module: str, bundle_folder: Path, tmp_path: Path) -> None:
    folder_of(["a"], tmp_path / "documents")
    words = ("batch", bundle_folder, "documents", "--output", "out.jsonl")
    outcome = without([module], "aftserve", *words, cwd=tmp_path)
    assert_refused(outcome, f"needs {module}", "pip install 'aftexport[ray]'")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "Ray at 127.0.0.1:1 cannot be reached"),
        ("127.0.0.1:70000", "Ray at 127.0.0.1:70000 cannot be reached"),
        (":", "host:port"),
        ("127.0.0.1:", "host:port"),
        ("ray://:10001", "host:port"),
    ],
)
def test_a_ray_that_is_not_there_is_named(
    address: str, said: str, bundle_folder: Path, tmp_path: Path
) -> None:
    folder_of(["a"], tmp_path / "documents")
    words = ("documents", "--output", "out.jsonl", "--address", address)
    outcome = run_python("-m", "aftserve", "batch", bundle_folder, *words, cwd=tmp_path)
    assert_refused(outcome, said)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_bundle_of_a_commands_name_is_reached_by_its_path(tmp_path: Path) -> None:
    for name in ("batch", "deploy", "key"):
        assert_refused(run_python("-m", "aftserve", f"./{name}", cwd=tmp_path), f"{name}: ")
