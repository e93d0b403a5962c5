"""The folder of an export: unusable, existing, or changed by another program meanwhile."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from bad_models import model_folder
from commands import assert_refused, listing, run_here, run_python

from aftexport.bundle.bundle import Bundle
from aftexport.errors import EngineError, UsageError
from aftexport.options import ExportOptions, as_source
from aftexport.parity.page import write_page
from aftexport.parity.report import Report
from aftexport.pipeline import export as exporter
from aftexport.pipeline.export import export
from aftexport.pipeline.request import checked_request


def text_file(path: Path) -> None:
    path.write_text("text")


def foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def foreign_manifest(path: Path) -> None:
    """Many a program has a manifest.json."""
    foreign_folder(path)
    (path / "manifest.json").write_text('{"name": "my web page"}')


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


OUTS: dict[str, tuple[Any, str, list[str]]] = {
    "a file": (text_file, "out", []),
    "a file, with --force": (text_file, "out", ["--force"]),
    "below a file": (text_file, "out/below", []),
    "someone's folder": (foreign_folder, "out", []),
    "someone's folder, with --force": (foreign_folder, "out", ["--force"]),
    "someone's manifest.json, with --force": (foreign_manifest, "out", ["--force"]),
    "a link to nowhere": (dangling_link, "out", []),
    "a name too long": (lambda path: None, "o" * 300, []),
    "a folder without a name": (lambda path: None, "/", []),
    "a kernel's folder": (lambda path: None, "/proc/no/such", []),
}


@pytest.mark.parametrize("task", ["token-classification", {"tags": "token-classification"}])
def test_task_may_have_hyphens(task: Any, tmp_path: Path) -> None:
    request = checked_request(as_source("model.pt"), ExportOptions(task=task, out=tmp_path / "b"))
    name = "token_classification"
    assert request.options.task == (name if isinstance(task, str) else {"tags": name})


@pytest.mark.parametrize("kind", OUTS)
def test_unusable_out_is_refused_and_untouched(
    kind: str, state_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, out, options = OUTS[kind]
    make(tmp_path / "out")
    before = listing(tmp_path)
    words = [state_file, "--to", "onnx", "--factory", "tiny_models:Bag", "--no-verify"]
    assert_refused(run_here([*words, "--out", tmp_path / out, *options], capsys), out)
    assert listing(tmp_path) == before


def test_unwritable_folder_is_refused(
    state_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    out = tmp_path / "locked" / "out"
    words = [state_file, "--to", "onnx", "--factory", "tiny_models:Bag", "--out", out]
    assert_refused(run_here(words, capsys), str(out.parent))
    assert not listing(tmp_path / "locked")


def test_existing_bundle_stays_unless_forced(
    checkpoint_file: Path, bundle_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(bundle_copy.parent)
    outcome = run_here([checkpoint_file, "--to", "onnx", "--out", bundle_copy], capsys)
    assert_refused(outcome, "--force")
    assert listing(bundle_copy.parent) == before


def test_force_never_removes_the_model_itself(
    checkpoint_file: Path, bundle_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = bundle_copy / "model.pt"
    model.write_bytes(checkpoint_file.read_bytes())
    run_here([model, "--to", "onnx", "--out", bundle_copy, "--force", "--no-verify"], capsys)
    assert model.exists()


def test_model_itself_is_not_overwritten(
    checkpoint_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder()(tmp_path, checkpoint_file)
    before = listing(tmp_path)
    words = [folder, "--to", "onnx", "--out", folder, "--force"]
    assert_refused(run_here(words, capsys), "the model itself")
    assert listing(tmp_path) == before


def test_a_failure_while_checking_leaves_nothing(
    state_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def failing(bundle: Bundle) -> None:
        raise EngineError("The runtime failed.", "Try another.")

    monkeypatch.setattr(exporter, "verify", failing)
    words = [
        state_file,
        "--to",
        "onnx",
        "--factory",
        "tiny_models:Bag",
        "--out",
        tmp_path / "new" / "b",
    ]
    assert_refused(run_here(words, capsys), "The runtime failed")
    assert not listing(tmp_path)


def test_current_folder_can_be_exported(
    checkpoint_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = model_folder()(tmp_path, checkpoint_file)
    monkeypatch.chdir(folder)
    outcome = run_here([".", "--to", "onnx", "--no-verify"], capsys)
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "model.bundle").is_dir()


def test_concurrent_bundle_is_not_replaced(
    checkpoint_file: Path, bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model.bundle"

    def slow_writing(folder: Path, report: Report) -> None:
        shutil.copytree(bundle_folder, out)
        write_page(folder, report)

    monkeypatch.setattr(exporter, "write_page", slow_writing)
    with pytest.raises(UsageError, match=r"model\.bundle exists"):
        export(checkpoint_file, out=out, labels=["x", "y", "z"])
    assert listing(out) == listing(bundle_folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model.bundle"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names of files are of any bytes on Linux")
def test_names_outside_unicode_work(checkpoint_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xfcber")
    folder.mkdir()
    shutil.copy(checkpoint_file, folder / "model.pt")
    words = ["-m", "aftexport", "model.pt", "--to", "onnx"]
    exported = run_python(*words, cwd=folder)
    assert exported.code == 0, exported.err
    again = folder / os.fsdecode(b"\xe4.bundle")
    (folder / "model.bundle").rename(again)
    bench = ["bench", again.name, "--lengths", "9", "--rounds", "1", "--output", "times.json"]
    timed = run_python("-m", "aftexport", *bench, cwd=folder)
    assert timed.code == 0, timed.err
    assert json.loads((folder / "times.json").read_text("utf-8"))["bundle"] == again.name


def test_name_of_factory_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = export(factory="tiny_models:Bag", out="Bag", check_parity=False)
    assert bundle.path == Path("Bag")
    (tmp_path / "Bag" / "config.json").write_text('{"problem_type": "regression"}')
    again = export(factory="tiny_models:Bag", out="other", check_parity=False)
    assert again.manifest.heads["logits"].task == "single_label_classification"
