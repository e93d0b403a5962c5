"""Arguments, packages and Ray addresses that ``aftserve batch`` refuses before it starts a run."""

from pathlib import Path

import commands
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import assert_refused, run_python, without
from text_folders import write_texts

from aftexport.system.installation import install_command
from aftserve.cli import main

TIMING_OUT = """
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


def test_ray_startup_timeout_is_reported(bundle_folder: Path, tmp_path: Path) -> None:
    write_texts(["a"], tmp_path / "documents")
    words = ("batch", bundle_folder, "documents", "--output", "out.jsonl")
    outcome = run_python("-c", TIMING_OUT, *words, cwd=tmp_path)
    assert_refused(outcome, "Ray on this machine is not available", "timed out during startup")


def test_empty_input_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["batch", "model.bundle", "", "--output", "out.jsonl"])
    assert "argument INPUT: the path is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_invalid_arguments_are_refused_without_ray(
    words: list[str], message: str, bundle_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    write_texts(["a"], tmp_path / "documents")
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
    assert_refused(commands.Outcome(code, captured.out, captured.err), message)


@pytest.mark.parametrize(("module", "extra"), [("ray", "ray"), ("pyarrow", "parquet")])
def test_missing_package_names_the_extra(
    module: str, extra: str, bundle_folder: Path, tmp_path: Path
) -> None:
    write_texts(["a"], tmp_path / "documents")
    words = ("batch", bundle_folder, "documents", "--output", "out.jsonl")
    outcome = without([module], "aftserve", *words, cwd=tmp_path)
    assert_refused(outcome, f"needs {module}", install_command(extra))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "Ray at 127.0.0.1:1 cannot be reached"),
        ("127.0.0.1:70000", "Ray at 127.0.0.1:70000 cannot be reached"),
        (":", "host:port"),
        ("127.0.0.1:", "host:port"),
        ("ray://:10001", "host:port"),
    ],
)
def test_unreachable_ray_is_reported(
    address: str, message: str, bundle_folder: Path, tmp_path: Path
) -> None:
    write_texts(["a"], tmp_path / "documents")
    words = ("documents", "--output", "out.jsonl", "--address", address)
    outcome = run_python("-m", "aftserve", "batch", bundle_folder, *words, cwd=tmp_path)
    assert_refused(outcome, message)
    assert not (tmp_path / "out.jsonl").exists()


def test_bundle_named_like_command_needs_path(tmp_path: Path) -> None:
    for name in ("batch", "deploy", "key"):
        assert_refused(run_python("-m", "aftserve", f"./{name}", cwd=tmp_path), f"{name}: ")
