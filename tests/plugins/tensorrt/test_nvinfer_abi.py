"""Our declaration of TensorRT's plugin interface against the real headers, where present."""

import subprocess
from pathlib import Path

import pytest

from .test_plugins import run


@pytest.fixture(scope="module")
def versions(programs: Path) -> list[str]:
    """Return the versions of the headers that the build found."""
    found = [v for v in (programs / "nvinfer_versions").read_text().split(";") if v]
    if not found:
        pytest.skip(
            "no NvInferRuntime.h of TensorRT 10 or later with a cuda_runtime_api.h "
            "(set TENSORRT_ROOT to the folder of include/, or to several, as in PATH)"
        )
    return found


def listing(program: Path) -> str:
    """Return a program's virtual tables, signatures, sizes, offsets and enumerators."""
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def test_declaration_equals_the_headers(programs: Path, versions: list[str]) -> None:
    for version in versions:
        declared = listing(programs / f"abi_listing_{version.partition('.')[0]}")
        assert declared.count("\n") > 90
        assert listing(programs / f"abi_listing_nvinfer_{version}") == declared, version


def test_host_and_plugins_mix_headers(programs: Path, versions: list[str]) -> None:
    """A host and plugins of any headers understand each other."""
    builds = ["", *(f"_nvinfer_{version}" for version in versions)]
    for host in builds:
        for plugins in builds:
            library = programs / f"libaftplugins_tensorrt{plugins}.so"
            output = run(programs / f"plugin_test{host}", library)
            assert "16 operators, 0 failures" in output, (host, plugins)
