"""A linear layer and a residual in PyTorch; see ``encoder.linear_residual``."""

from torch import Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Compute the definition.

    Args:
        x: ``[B, T, E]``.
        weight: ``[E, D]``.
        bias: ``[D]``.
        residual: ``[B, T, D]``.
    """
    return residual + x @ weight + bias
