"""The installation from the sources: without a compiler, with one that fails, and with Clang."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sampling import any_case

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "plugins"
SOURCES = sorted([*PLUGINS.glob("cpu/**/*.cc"), *PLUGINS.glob("onnxruntime/*.cc")])
BIN = Path(sys.executable).parent
"""CMake and Ninja, and no compiler."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source folder with the files that an installation reads."""
    folder = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("export", "plugins", "serve"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build_wheel(
    source: Path, out: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    return subprocess.run(
        [*pip, "--wheel-dir", out, *options, source],
        env={"PATH": str(BIN), "HOME": str(out)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("options", [(), ("-C", "wheel.cmake=false")])
def test_wheel_has_no_kernels(options: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    """No compiler is found, or the user wants no kernels whatever the compiler does."""
    environment = {"CXX": "false"} if options else {}
    done = build_wheel(source, tmp_path, *options, **environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "aftplugins/__init__.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_failed_compilation_fails_installation(source: Path, tmp_path: Path) -> None:
    """The compiler takes CMake's trial programs, but no kernel."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        f"""#!/bin/sh
case "$*" in *{source}*.cc*) echo "expected ';' before '}}' token" >&2; exit 1 ;; esac
PATH=/usr/bin:/bin exec c++ "$@"
""",
        "utf-8",
    )
    compiler.chmod(0o755)
    done = build_wheel(source, tmp_path / "out", CXX=str(compiler))
    assert done.returncode != 0
    assert "expected ';' before '}' token" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.whl"))


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
