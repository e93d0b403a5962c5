import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from aftexport.bench.timing import Run
from benchmarks import register_rates


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


def test_missing_instruction_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = SimpleNamespace(fp32=lambda rounds: 0 * rounds)
    monkeypatch.setattr(register_rates, "compile_library", lambda: lacking)
    with pytest.raises(RuntimeError, match="Expected a processor with AVX2 and FMA"):
        register_rates.register_rate("fp32", 1)


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_registers_are_faster_than_matrix_product() -> None:
    """A loop that keeps its sums in memory has half the rate, which a product exceeds."""
    size = 512
    left, right = torch.rand(size, size), torch.rand(size, size)
    out = torch.empty(size, size)
    with one_thread():
        product = size**3 / least_seconds(lambda: torch.mm(left, right, out=out))
    rate = register_rates.register_rate("fp32", 1)
    assert rate.work / least_seconds(rate.run) > product
