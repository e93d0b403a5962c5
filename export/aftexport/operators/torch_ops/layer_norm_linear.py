"""A norm and a linear layer in PyTorch; see ``encoder.layer_norm_linear``."""

import torch
from torch import Tensor


def reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    epsilon: float,
) -> Tensor:
    """Compute the definition.

    Args:
        x: ``[B, T, D]``.
        norm_weight, norm_bias: ``[D]``.
        weight: ``[D, E]``.
        bias: ``[E]``.
        epsilon: the constant that is added to the variance.
    """
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, epsilon)
    return normed @ weight + bias
