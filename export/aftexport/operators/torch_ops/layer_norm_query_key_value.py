"""A norm and the projections of attention in PyTorch; see the same file of ``encoder``."""

import torch
from torch import Tensor


def reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    value_weight: Tensor,
    value_bias: Tensor,
    *,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the definition.

    Args:
        x: ``[B, T, D]``.
        norm_weight, norm_bias: ``[D]``.
        query_weight, key_weight, value_weight: ``[D, E]``, ``[D, F]``, ``[D, G]``.
        query_bias, key_bias, value_bias: ``[E]``, ``[F]``, ``[G]``.
        epsilon: the constant that is added to the variance.

    Returns:
        query ``[B, T, E]``, key ``[B, T, F]`` and value ``[B, T, G]``.
    """
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, epsilon)
    return (
        normed @ query_weight + query_bias,
        normed @ key_weight + key_bias,
        normed @ value_weight + value_bias,
    )
