"""The command ``aftserve`` before it serves: help, other names, and mistyped words."""

import re
from pathlib import Path

import onnxruntime
import pytest
from commands import assert_refused, run_python

from aftserve.cli import COMMANDS, main
from aftserve.setting_sources import ONLY_IN_FILE
from aftserve.settings import Settings

IMPORTED = (
    "import sys\n"
    "from aftserve.cli import main\n"
    "try:\n"
    "    main(sys.argv[1:])\n"
    "finally:\n"
    "    print(*(name for name in sys.modules if '.' not in name), file=sys.stderr)\n"
)
HEAVY = {"fastapi", "starlette", "uvicorn", "onnxruntime", "onnx", "numpy", "tokenizers", "loky",
         "prometheus_client", "ray", "pyarrow", "torch"}  # fmt: skip


@pytest.mark.parametrize("words", [("--help",), ("batch", "--help"), ("deploy", "--help")])
def test_help_imports_no_heavy_module(words: tuple[str, ...], tmp_path: Path) -> None:
    outcome = run_python("-c", IMPORTED, *words, cwd=tmp_path)
    assert "usage: aftserve" in outcome.out
    assert not HEAVY & set(outcome.err.split())
    assert len(outcome.err.split()) > 50


def test_serve_is_another_name(tmp_path: Path) -> None:
    outcomes = [
        run_python("-m", "aftserve", *words, "--help", cwd=tmp_path) for words in [(), ("serve",)]
    ]
    assert outcomes[0] == outcomes[1]
    assert "--max-tokens" in outcomes[0].out


def test_help_has_commands_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "80", "-h"]) == 0
    text = capsys.readouterr().out
    flags = re.findall(r"^  --([a-z-]+)", text, re.MULTILINE)
    expected = {*Settings.model_fields} - {"bundles", *ONLY_IN_FILE}
    assert sorted(flags) == sorted(name.replace("_", "-") for name in expected)
    places = [text.index(f"\n  {name} ") for name in sorted(COMMANDS)]
    assert places == sorted(places)
    assert places[-1] < text.index("--port N")
    for python in ("Path(", "list[", "null", "None", "int\n", "float", "['"):
        assert python not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--admin", "key", "alice"), "admin = true"),
        (("--log-level", "key", "--threads=2", "--address", "auto", "deploy", "-h"), "replicas"),
        (("--no-reference-allow-pickle", "batch", "--help"), "usage: aftserve batch"),
        (("--port", "80", "serve", "--help"), "usage: aftserve [BUNDLE"),
    ],
)
def test_flags_may_precede_command(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """Also after a flag whose value is the name of a command."""
    outcome = run_python("-m", "aftserve", *words, cwd=tmp_path)
    assert outcome.code == 0, outcome
    assert said in outcome.out


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("bacth", "x"), "Write aftserve batch"),
        (("inspect", "x"), "Write aftexport inspect"),
        (("export", "model.pt"), "Write aftexport model.pt --to onnx"),
        (("model.bundle", "--max-toke", "3"), "Write --max-tokens"),
        (("serve", "model.bundle", "--prot=3"), "Write --port"),
        (("model.bundle", "--no-reference-alow-pickle"), "Write --no-reference-allow-pickle"),
        (("model.bundle", "--zzzz"), "unrecognized arguments: --zzzz"),
        (("deploy", "model.bundle", "--engine", "ray", "--prot", "3"), "Write --port"),
    ],
)
def test_mistyped_word_gets_suggestion(words: tuple[str, ...], remedy: str, tmp_path: Path) -> None:
    outcome = run_python("-m", "aftserve", *words, cwd=tmp_path)
    assert outcome.code == 2
    assert remedy in outcome.err


def test_existing_bundle_is_no_mistyped_command(tmp_path: Path) -> None:
    (tmp_path / "bacth").mkdir()
    outcome = run_python("-m", "aftserve", "bacth", cwd=tmp_path)
    assert outcome.code == 2
    assert "Write aftserve batch" not in outcome.err


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
    reason="ONNX Runtime has the CUDA execution provider",
)
@pytest.mark.parametrize("way", ["flag", "variable", "file"])
def test_missing_provider_ends_start(way: str, bundle_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "aftserve.toml"
    file.write_text('provider = "cuda"\n')
    words = {"flag": ["--provider", "cuda"], "file": ["--config", str(file)]}.get(way, [])
    variables = {"AFTSERVE_PROVIDER": "cuda"} if way == "variable" else {}
    words += ["--port", "0"]
    outcome = run_python("-m", "aftserve", bundle_folder, *words, cwd=tmp_path, **variables)
    assert_refused(outcome, "Expected CUDAExecutionProvider, got ONNX Runtime", "[cuda]")
