from pathlib import Path

import pytest

from ..cuda import emulated


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the plugin library over the emulated kernels and of its test programs."""
    if emulated.missing() is not None:
        pytest.skip(str(emulated.missing()))
    return emulated.build(emulated.SANITIZER) / "tensorrt"


@pytest.fixture(scope="session")
def library(programs: Path) -> Path:
    return programs / "libaftplugins_tensorrt.so"
