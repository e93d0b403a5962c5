"""GPUs for which times are expected, and the constants of the estimate."""

from dataclasses import dataclass

LAUNCH_SECONDS = 1.5e-6
"""Between two dependent kernels of a CUDA graph."""
MEMORY_SECONDS = 0.7e-6
"""A load from memory that nothing hides."""
CACHE_SECONDS = 0.2e-6
"""A load from the second-level cache that nothing hides."""
MERGE_CYCLES = 52
"""Between two dependent merges of running softmax sums."""
SCHEDULERS = 4
"""Of a multiprocessor, each issuing one instruction of a warp in a cycle."""
PHASE_SECONDS = 0.15e-6
"""From a barrier of a block to the next, beside the instructions; other blocks hide it."""
CACHED_SHARE = 0.7
"""Of the second-level cache that a tensor may fill and still be read from it a second time."""


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: as it is sold.
        architecture: the compute capability without its dot.
        multiprocessors: how many.
        clock: cycles a second under load.
        copy: bytes a second of a copy, read and written.
        cache: bytes of the second-level cache.
        cache_rate: bytes a second from that cache.
        product: operations of a multiprocessor's 16-bit tensor cores in a cycle, by mma.sync; in
            tf32 they are half as many.
        gemm: operations a second of a library's large 16-bit matrix product.
        memory: bytes.
    """

    name: str
    architecture: str
    multiprocessors: int
    clock: float
    copy: float
    cache: float
    cache_rate: float
    product: float
    gemm: float
    memory: float

    @property
    def issue_rate(self) -> float:
        """Instructions of warps that a multiprocessor issues in a second."""
        return SCHEDULERS * self.clock

    def library_rate(self, is_float32: bool) -> float:
        """Operations a second of a library's product, of float32 by multiply-adds without TF32."""
        multiply_adds = self.multiprocessors * SCHEDULERS * 32 * self.clock
        return 2 * multiply_adds if is_float32 else self.gemm

    def product_rate(self, is_tf32: bool) -> float:
        """Operations a second of the kernels' tensor-core instructions."""
        return self.multiprocessors * self.clock * self.product / (2 if is_tf32 else 1)


DEVICES = (
    Device("H100", "90", 132, 1.7e9, 3.0e12, 50e6, 5.5e12, 4096, 790e12, 80e9),
    Device("H200", "90", 132, 1.7e9, 4.3e12, 50e6, 5.5e12, 4096, 790e12, 141e9),
    Device("L4", "89", 58, 1.7e9, 0.27e12, 48e6, 1.5e12, 1024, 90e12, 24e9),
    Device("RTX 4090", "89", 128, 2.5e9, 0.92e12, 72e6, 5.0e12, 512, 150e12, 24e9),
    # The rate of mma.sync is that of the generation before Hopper: wider products need tcgen05.
    Device("B200", "100", 148, 1.85e9, 7.0e12, 126e6, 9.0e12, 2048, 1700e12, 180e9),
)
"""Rates that benchmarks reach, not those of data sheets; none was measured with these kernels."""
