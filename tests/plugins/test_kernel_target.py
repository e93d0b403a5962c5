"""`make test-kernel K=NAME` finds tests for the name of each kernel's file."""

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = sorted(
    {
        *(path.stem for path in ROOT.glob("plugins/cpu/mechanisms/**/*.cc")),
        *(path.stem for path in ROOT.glob("plugins/cpu/encoder/*.cc")),
    }
    - {"conv_weight"}  # a part of causal_depthwise_conv
)


def test_every_kernel_has_tests_by_name() -> None:
    """Only compiling it in Clang does not count."""
    command = [
        "make",
        "--no-print-directory",
        "--dry-run",
        "--old-file=.venv/installed",
        "test-kernel",
        "K=",
    ]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = shlex.split(printed.splitlines()[-1])
    assert Path(words[0]).name == "pytest"
    collect = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", *words[1:]]
    listed = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [line.lower() for line in listed.splitlines() if "compiles_in_clang" not in line]
    for kernel in KERNELS:
        assert any(kernel in name or kernel.replace("_", "") in name for name in names), kernel
