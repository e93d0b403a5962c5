"""Mistyped words of ``aftexport``, its other name, and the modules that its help needs."""

from pathlib import Path

import pytest
from commands import run_here, run_python

from aftexport.cli import COMMANDS

IMPORTED = (
    "import sys\n"
    "from aftexport.cli import main\n"
    "try:\n"
    "    main(sys.argv[1:])\n"
    "except SystemExit:\n"
    "    print(*(name for name in sys.modules if '.' not in name), file=sys.stderr)\n"
)
HEAVY = {"torch", "onnxruntime", "onnx", "onnxscript", "numpy", "tokenizers", "pydantic", "loky"}


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help_imports_no_heavy_module(words: tuple[str, ...], tmp_path: Path) -> None:
    outcome = run_python("-c", IMPORTED, *words, "--help", cwd=tmp_path)
    assert "usage: aftexport" in outcome.out
    assert not HEAVY & set(outcome.err.split())
    assert len(outcome.err.split()) > 50


def test_export_is_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(["export", "--help"], capsys)
    assert outcome == run_here(["--help"], capsys)
    assert "--precision" in outcome.out


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("verfy", "x"), "Write aftexport verify"),
        (("model.pt", "--too", "onnx"), "Write --to,"),
        (("export", "model.pt", "--to", "onnx", "--presision=fp16"), "Write --precision"),
        (("verify", "x", "--portabel"), "Write --portable"),
        (("model.pt", "--to", "onnx", "--zzzz"), "unrecognized arguments: --zzzz"),
    ],
)
def test_mistyped_word_gets_suggestion(
    words: tuple[str, ...], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(words, capsys)
    assert outcome.code == 2
    assert remedy in outcome.err


def test_missing_model_is_no_mistyped_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_here(["model.pt", "--to", "onnx"], capsys)
    assert outcome.code == 2
    assert "Write aftexport" not in outcome.err
