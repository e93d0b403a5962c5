"""Softmax attention of PyTorch, at the size of the operators: another function, for scale."""

import torch

from aftexport.bench.timing import Run
from benchmarks.contenders.contender import OperatorContender
from benchmarks.workloads import HEADS, Tensors, Workload


class Sdpa(OperatorContender):
    """``scaled_dot_product_attention`` with as many heads and channels."""

    name = "sdpa"
    title = "softmax attention (PyTorch SDPA)"
    precision = "fp32"
    is_same_function = False

    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Return the attention on query, key and value of its own."""
        heads = (workload.batch, workload.tokens, HEADS, workload.dim // HEADS)
        generator = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.randn(*heads, generator=generator).transpose(1, 2) for _ in range(3)
        )

        def run() -> object:
            with torch.inference_mode():
                return (torch.nn.functional.scaled_dot_product_attention(query, key, value),)

        return run


CONTENDERS = (Sdpa(),)
