"""Fastformer's additive attention in PyTorch; see ``mechanisms.fastformer``."""

import math
from collections.abc import Callable

from torch import Tensor

from aftexport.operators.numerics import (
    check_heads,
    check_lengths,
    check_same_shape,
    mask_keys,
    softmax_mean,
    split_heads,
)
from aftexport.operators.torch_ops.aft_simple import prefix_means, running_means
from aftexport.operators.torch_ops.torch_op import register_pair


def _check(
    op_type: str,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha_weight: Tensor,
    beta_weight: Tensor,
    lengths: Tensor,
    num_heads: int,
) -> None:
    check_same_shape(op_type, query=query, key=key, value=value)
    check_lengths(op_type, query, lengths)
    check_heads(op_type, query, num_heads)
    for name, weight in (("alpha_weight", alpha_weight), ("beta_weight", beta_weight)):
        if weight.dim() != 2 or weight.shape[0] != query.shape[2] or weight.shape[1] != num_heads:
            raise ValueError(
                f"{op_type}: {name} must be [{query.shape[2]}, {num_heads}], "
                f"got shape {tuple(weight.shape)}"
            )


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha_weight: Tensor,
    beta_weight: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    causal: bool,
) -> Tensor:
    """Compute the definition; the causal form pools each prefix separately.

    Args:
        query, key, value: ``[B, T, D]``.
        alpha_weight, beta_weight: ``[D, H]``.
        lengths: int64 ``[B]``.
    """
    pool = prefix_means if causal else softmax_mean
    return _attend(query, key, value, alpha_weight, beta_weight, lengths, num_heads, pool)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha_weight: Tensor,
    beta_weight: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    causal: bool,
) -> Tensor:
    """Compute ``reference``; the causal form uses running sums."""
    pool = running_means if causal else softmax_mean
    return _attend(query, key, value, alpha_weight, beta_weight, lengths, num_heads, pool)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha_weight: Tensor,
    beta_weight: Tensor,
    lengths: Tensor,
    num_heads: int,
    pool: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    scale = 1 / math.sqrt(query.shape[2] // num_heads)
    queries, keys, values = (split_heads(x, num_heads) for x in (query, key, value))
    alpha_logits = mask_keys(query @ alpha_weight * scale, lengths)
    keyed = keys * pool(alpha_logits[..., None], queries)
    beta_logits = mask_keys(keyed.flatten(2) @ beta_weight * scale, lengths)
    return (values * pool(beta_logits[..., None], keyed)).flatten(2)


FASTFORMER, CAUSAL_FASTFORMER = register_pair(
    "Fastformer", check=_check, compute=compute, reference=reference
)
