"""Completion of command lines: what argcomplete's scripts get from both programs."""

from pathlib import Path

import pytest
from commands import run_python, without


def variables(line: str, out: Path) -> dict[str, str]:
    """Return the variables that the scripts set for a line with the cursor at its end."""
    return {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }


@pytest.mark.parametrize(
    ("line", "offered", "absent"),
    [
        ("aftexport ", {"verify", "bench", "model.pt"}, {"--to"}),
        ("aftexport ver", {"verify"}, {"bench", "model.pt"}),
        ("aftexport model.pt --t", {"--to", "--task"}, {"--search"}),
        ("aftexport model.pt --to ", {"onnx", "triton"}, {"model.pt"}),
        ("aftexport verify --s", {"--search"}, {"--to"}),
        ("aftexport verify m", {"model.pt"}, set()),
        ("aftserve ", {"predict", "key", "model.pt"}, {"verify"}),
        ("aftserve model.bundle --por", {"--port"}, {"--portable"}),
        ("aftserve --engine ", {"onnxruntime", "tensorrt"}, set()),
        ("aftserve batch b in --out", {"--output"}, set()),
    ],
)
def test_shell_gets_words_that_fit(
    line: str, offered: set[str], absent: set[str], tmp_path: Path
) -> None:
    (tmp_path / "model.pt").touch()
    out = tmp_path / ".offered"
    program = line.split()[0]
    outcome = run_python("-m", program, cwd=tmp_path, **variables(line, out))
    assert outcome.code == 0, outcome.err
    found = {word.strip() for word in out.read_text().split("\n")}
    assert offered <= found
    assert not absent & found


def test_commands_need_no_argcomplete(tmp_path: Path) -> None:
    outcome = without(["argcomplete"], "aftexport", "verify", "--help", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
