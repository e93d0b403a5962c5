"""The kernels on the emulated GPU, and their build for real ones."""

import pytest
from benchmarks.gpu.library import Kernels

from . import built, emulated


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    if (why := emulated.missing()) is not None:
        pytest.skip(why)
    return Kernels(emulated.build() / "libaft_cuda.so")


@pytest.fixture(scope="session")
def architectures() -> set[str]:
    """Return the compute capabilities, without the dot, of an updated build/cuda."""
    if (why := built.missing()) is not None:
        pytest.skip(why)
    return built.update()
