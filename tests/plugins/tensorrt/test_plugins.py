"""The TensorRT plugins in a C++ host that plays TensorRT, over the emulated kernels.

The host loads them itself, or through the plugin registry of a real TensorRT. AFT_SANITIZE as in
test_cuda_kernels.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..cuda import emulated

STEMS = [
    "aft_conv",
    "aft_full",
    "aft_local",
    "aft_simple",
    "efficient_attention",
    "fastformer",
    "linear_attention",
]
RUNTIMES = {
    "tensorrt-dispatch-cu13-libs": ("tensorrt_dispatch_libs", "libnvinfer_dispatch.so.11"),
    "tensorrt-rtx": ("tensorrt_rtx_libs", "libtensorrt_rtx.so.1"),
}
"""By the wheel that has a plugin registry: its package, and the library in it."""
SYSTEM = {"libstdc++", "libm", "libgcc_s", "libc", "libdl", "libpthread", "librt"}
EMULATED = {"libemulator"}
"""The library of the emulated GPU, which only the tests' own plugin library needs."""
if emulated.SANITIZER:
    EMULATED |= {"libasan", "libubsan", "libtsan"}
NEEDS_BINUTILS = pytest.mark.skipif(shutil.which("readelf") is None, reason="no binutils")


def library_of(wheel: str) -> Path:
    """Return the library of a wheel that has a plugin registry."""
    package, name = RUNTIMES[wheel]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{wheel} is not installed")
    if emulated.SANITIZER:
        pytest.skip(f"{wheel} is not built with the sanitizer")
    return Path(spec.submodule_search_locations[0]) / name


def run(program: Path, library: Path, *options: str, wheel: str | None = None) -> str:
    """Run a test program on a plugin library; it must succeed."""
    environment = os.environ | {"AFT_TENSORRT_LIBRARY": str(library)}
    if wheel is not None:
        environment["AFT_TENSORRT_RUNTIME"] = str(library_of(wheel))
    done = subprocess.run(
        [program, *options], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("wheel", [None, *RUNTIMES])
def test_every_method_of_every_plugin(
    programs: Path, each_library: Path, wheel: str | None
) -> None:
    output = run(programs / "plugin_test", each_library, wheel=wheel)
    assert "16 operators, 0 failures" in output
    if wheel == "tensorrt-rtx":
        assert "with its logger" in output


def test_precision_says_how_exponentials_are_multiplied(programs: Path, library: Path) -> None:
    assert "0 failures" in run(programs / "precision_test", library)


def test_product_plugins_give_bits_of_kernels(programs: Path, library: Path) -> None:
    assert "0 failures" in run(programs / "product_test", library)


@pytest.mark.parametrize(("wheel", "every"), [(None, 4), ("tensorrt-dispatch-cu13-libs", 8)])
@pytest.mark.parametrize("stem", STEMS)
def test_plugin_matches_definition(
    programs: Path,
    library: Path,
    stem: str,
    wheel: str | None,
    every: int,
    count_cases: Callable[[int, int], None],
) -> None:
    words = [*emulated.BOUNDS, emulated.share(every)]
    output = run(programs / f"{stem}_through_plugin", library, *words, wheel=wheel)
    count_cases(*emulated.cases(output))


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@NEEDS_BINUTILS
def test_two_functions_are_visible(each_library: Path) -> None:
    symbols = output_of("nm", "--dynamic", "--defined-only", each_library).splitlines()
    assert sorted(line.split()[-1] for line in symbols) == ["getCreators", "setLoggerFinder"]


@NEEDS_BINUTILS
def test_library_loads_without_tensorrt_or_cuda(each_library: Path) -> None:
    entries = output_of("readelf", "--dynamic", each_library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", entries))
    assert "libc" in needed
    assert {name for name in needed if not name.startswith("ld-linux")} <= SYSTEM | EMULATED
