"""A launch of a kernel, and the sizes of a workload."""

from dataclasses import dataclass

import torch

from benchmarks.gpu.workloads import Workload

ELEMENTS = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, or of a library's matrix product where ``kernel`` is empty.

    Attributes:
        stem: the source file.
        kernel: the name with template arguments.
        grid: blocks.
        read: bytes that come from memory, or are written there.
        again: bytes that were read before and come from the cache if they fit.
        reused: bytes of the tensors that must stay in the cache for that.
        cached: bytes that neighboring blocks read at the same time, and that one of them brings.
        flops: of products, those of split operands counted three times.
        iterations: of the hot loop.
        before: iterations of the loops before the hot loop.
        after: iterations of the longest loop behind it.
        inner: iterations of its inner loops without products.
        exposed: loads in a row that nothing hides, of a block.
        records: records that one thread merges in a row.
        at_once: records that are loaded together.
        is_float32: a library's product has operands of float32.
    """

    stem: str
    kernel: str
    grid: int
    read: float = 0
    again: float = 0
    reused: float = 0
    cached: float = 0
    flops: float = 0
    iterations: float = 0
    before: float = 1
    after: float = 0
    inner: float = 1
    exposed: float = 1
    records: float = 0
    at_once: int = 1
    is_float32: bool = False


class Sizes:
    """Sizes that the launches of a workload share.

    Args:
        workload: mechanism, sizes and type.

    Attributes:
        element: the type of the tensors, as in the names of kernels.
        bytes, vector: bytes of an element; elements in 16 bytes.
        exact: products have operands of float32.
        tensor, elements: bytes and elements of a tensor [batch, tokens, channels].
    """

    def __init__(self, workload: Workload) -> None:
        self.w = workload
        self.element = ELEMENTS[workload.dtype]
        self.bytes = workload.dtype.itemsize
        self.vector = 16 // self.bytes
        self.exact = workload.dtype == torch.float32
        self.tensor = float(workload.batch * workload.tokens * workload.dim * self.bytes)
        self.elements = float(workload.batch * workload.tokens * workload.dim)
