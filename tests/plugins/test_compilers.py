"""Clang compiles the sources of ONNX Runtime's libraries as well as the installed compiler."""

import shutil
import subprocess
from pathlib import Path

import pytest
from sampling import any_case

PLUGINS = Path(__file__).parents[2] / "plugins"
SOURCES = sorted([*PLUGINS.glob("cpu/**/*.cc"), *PLUGINS.glob("onnxruntime/*.cc")])


@pytest.mark.table(keep=0.4, by=any_case)
@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++")
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.stem)
def test_a_source_compiles_in_clang(source: Path) -> None:
    folders = [f"-I{PLUGINS}", f"-I{PLUGINS / 'cpu'}"]
    command = [
        "clang++",
        "-std=c++17",
        "-fsyntax-only",
        "-DAFT_ISA=baseline",
        '-DAFT_VERSION="0"',
        *folders,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
