"""What the machine can do at best, measured in the same run as the contenders."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Limits:
    """Rates of this machine with the benchmark's threads.

    Attributes:
        copy: bytes read plus bytes written per second, of a large copy.
        gemm: float32 operations per second of a large matrix product.
        exp: float32 exponentials per second of a large array.
    """

    copy: float
    gemm: float
    exp: float

    def seconds(self, *, bytes_moved: float, flops: float, exps: float) -> tuple[float, str]:
        """The least time for some work, and which rate bounds it."""
        needed = {
            "copy": bytes_moved / self.copy,
            "gemm": flops / self.gemm,
            "exp": exps / self.exp,
        }
        kind = max(needed, key=needed.__getitem__)
        return needed[kind], kind


def measure() -> Limits:
    """Measures the rates; takes about two seconds."""
    elements = 1 << 25
    source, target = torch.rand(elements), torch.empty(elements)
    size = 1024
    left, right, product = torch.rand(size, size), torch.rand(size, size), torch.empty(size, size)
    return Limits(
        copy=8 * elements / _best(lambda: target.copy_(source)),
        gemm=2 * size**3 / _best(lambda: torch.mm(left, right, out=product)),
        exp=(1 << 18) / _best(lambda: torch.exp(source[: 1 << 18], out=target[: 1 << 18])),
    )


def _best(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(sorted(seconds)[:5])
