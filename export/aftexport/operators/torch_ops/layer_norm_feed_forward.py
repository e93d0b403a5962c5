"""The feed-forward half of a layer in PyTorch; see ``encoder.layer_norm_feed_forward``."""

import torch
from torch import Tensor


def reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    *,
    epsilon: float,
) -> Tensor:
    """Compute the definition.

    Args:
        x: ``[B, T, D]``.
        norm_weight, norm_bias, bias_out: ``[D]``.
        weight_in: ``[D, F]``.
        bias_in: ``[F]``.
        weight_out: ``[F, D]``.
        epsilon: the constant that is added to the variance.
    """
    functional = torch.nn.functional
    normed = functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, epsilon)
    return x + functional.gelu(normed @ weight_in + bias_in) @ weight_out + bias_out
