"""Our declaration of TensorRT's plugin interface, its listings, and the real headers.

The listings in ``abi`` hold every virtual-table slot, signature, size, offset and enumerator that
the plugins rely on, one for each major version. They are what the real headers must print.
TENSORRT_ROOT names the folder of ``include``, several of them as in PATH, or a folder of such
folders. Without headers, the declaration is compared with the listings, and its enumerators with
those of TensorRT-RTX.
"""

import re
import subprocess
from pathlib import Path

import pytest

from .test_plugins import run

LISTINGS = {path.stem: path.read_text() for path in Path(__file__).with_name("abi").glob("*.txt")}
"""The listing of each major version."""
ENUMERATIONS = {
    "APILanguage",
    "DataType",
    "DimensionOperation",
    "PluginCapabilityType",
    "PluginFieldType",
    "TensorFormat",
    "TensorRTPhase",
}


@pytest.fixture(scope="module")
def versions(programs: Path) -> list[str]:
    """Return the versions of the headers that the build found."""
    found = [v for v in (programs / "nvinfer_versions").read_text().split(";") if v]
    if not found:
        pytest.skip(
            "no NvInferRuntime.h of TensorRT 10 or later with a cuda_runtime_api.h "
            "(set TENSORRT_ROOT to the folder of include/, or to a folder of such folders)"
        )
    return found


def listing(program: Path) -> str:
    """Return a program's virtual tables, signatures, sizes, offsets and enumerators."""
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("major", ["10", "11"])
def test_declaration_equals_listing(programs: Path, major: str) -> None:
    assert LISTINGS[major].count("\n") > 90
    assert listing(programs / f"abi_listing_{major}") == LISTINGS[major]


def test_headers_equal_listing(programs: Path, versions: list[str]) -> None:
    for version in versions:
        major = version.partition(".")[0]
        assert listing(programs / f"abi_listing_nvinfer_{version}") == LISTINGS[major], version


@pytest.mark.parametrize("major", ["10", "11"])
def test_enumerators_equal_rtx_bindings(major: str) -> None:
    """The real runtime shows its enumerations to Python."""
    trt = pytest.importorskip("tensorrt_rtx")
    numbers = re.findall(r"^  (\w+)::k(\w+) = (\d+)$", LISTINGS[major], re.MULTILINE)
    assert {kind for kind, _, _ in numbers} == ENUMERATIONS
    for kind, name, number in numbers:
        assert int(getattr(getattr(trt, kind), name)) == int(number), (kind, name)


def test_host_and_plugins_mix_headers(programs: Path, versions: list[str]) -> None:
    """A host and plugins of any headers understand each other."""
    builds = ["", *(f"_nvinfer_{version}" for version in versions)]
    for host in builds:
        for plugins in builds:
            library = programs / f"libaftplugins_tensorrt{plugins}.so"
            output = run(programs / f"plugin_test{host}", library)
            assert "16 operators, 0 failures" in output, (host, plugins)
