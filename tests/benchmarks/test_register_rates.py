import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from aftexport.bench.timing import Run
from benchmarks.register_rates import register_rates


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def least_seconds(run: Run) -> float:
    """Return the least processor time of a few calls."""
    found = []
    for _ in range(8):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_registers_are_faster_than_matrix_product() -> None:
    """A loop that keeps its sums in memory has half the rate, which a product exceeds."""
    size = 512
    left, right = torch.rand(size, size), torch.rand(size, size)
    out = torch.empty(size, size)
    with one_thread():
        product = size**3 / least_seconds(lambda: torch.mm(left, right, out=out))
    rate = register_rates(1)["fp32"]
    assert rate.work / least_seconds(rate.run) > product
