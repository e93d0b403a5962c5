"""The attention half of a Fastformer layer in PyTorch; see ``encoder.layer_norm_fastformer``."""

import torch
from torch import Tensor

from aftexport.operators.numerics import mask_keys, softmax


def reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    alpha_weight: Tensor,
    beta_weight: Tensor,
    weight: Tensor,
    bias: Tensor,
    lengths: Tensor,
    *,
    epsilon: float,
    num_heads: int,
) -> Tensor:
    """Compute the definition.

    Args:
        x: ``[B, T, D]``.
        norm_weight, norm_bias, query_bias, key_bias, bias: ``[D]``.
        query_weight, key_weight, weight: ``[D, D]``.
        alpha_weight, beta_weight: ``[D, H]``, A and B above.
        lengths: int64 ``[B]``.
        epsilon: the constant that is added to the variance.
        num_heads: number of heads H.
    """
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, epsilon)

    def pool(logits: Tensor, head_weight: Tensor, head_bias: Tensor) -> Tensor:
        means = softmax(mask_keys(logits, lengths)).transpose(1, 2) @ normed
        per_head = head_weight.reshape(len(head_weight), num_heads, -1).transpose(0, 1)
        pooled = means[:, :, None] @ per_head
        return pooled.flatten(1)[:, None] + head_bias

    global_query = pool(normed @ alpha_weight, query_weight, query_bias)
    beta = key_weight @ (global_query.transpose(1, 2) * beta_weight)
    global_key = global_query * pool(normed @ beta, key_weight, key_bias)
    mixed = normed @ (query_weight * global_key @ weight + query_weight)
    return x + mixed + (query_bias * global_key) @ weight + query_bias + bias
