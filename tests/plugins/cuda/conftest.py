"""The library of the kernels on the emulated GPU."""

import pytest
from benchmarks.gpu.library import Kernels

from . import emulated


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    if (why := emulated.missing()) is not None:
        pytest.skip(why)
    return Kernels(emulated.build() / "libaft_cuda.so")
