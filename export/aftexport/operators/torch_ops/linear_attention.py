"""Linear attention with a normalizer in PyTorch; see ``mechanisms.linear_attention``."""

import torch
from torch import Tensor

from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.operators.numerics import (
    causal_product,
    check_heads,
    check_lengths,
    check_same_shape,
    context,
    split_heads,
    valid_keys,
)
from aftexport.operators.torch_ops.torch_op import register_pair


def _check(
    op_type: str,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    num_heads: int,
    feature_map: str,
    eps: float,
) -> None:
    check_same_shape(op_type, query=query, key=key, value=value)
    check_lengths(op_type, query, lengths)
    check_heads(op_type, query, num_heads)
    if not eps > 0:
        raise ValueError(f"{op_type}: eps must be positive, got {eps}")


def features(x: Tensor, feature_map: str) -> Tensor:
    """Return phi(x). Below 0 it is exp(x), because elu(x) + 1 would lose small values."""
    if feature_map == "relu":
        return x.relu()
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def _projected(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, num_heads: int, feature_map: str
) -> tuple[Tensor, Tensor, Tensor]:
    valid = valid_keys(lengths, query.shape[1])[..., None, None]
    queries = features(split_heads(query, num_heads), feature_map)
    keys = torch.where(valid, features(split_heads(key, num_heads), feature_map), 0)
    values = split_heads(value, num_heads)
    return queries, keys, torch.cat((values, torch.ones_like(values[..., :1])), 3)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    feature_map: str,
    eps: float,
    causal: bool,
) -> Tensor:
    """Compute the definition, row by row, from the similarities phi(Q[t]) . phi(K[u]).

    Args:
        query, key, value: ``[B, T, D]``.
        lengths: int64 ``[B]``.
    """
    queries, keys, values = _projected(query, key, value, lengths, num_heads, feature_map)
    rows = []
    for t in range(query.shape[1]):
        end = t + 1 if causal else query.shape[1]
        similarity = torch.einsum("bhc,buhc->buh", queries[:, t], keys[:, :end])
        sums = torch.einsum("buh,buhe->bhe", similarity, values[:, :end])
        rows.append(_divided(sums, eps))
    return torch.stack(rows, 1).flatten(2)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    feature_map: str,
    eps: float,
    causal: bool,
) -> Tensor:
    """Compute ``reference`` in time linear in T: keys and values are multiplied first."""
    queries, keys, values = _projected(query, key, value, lengths, num_heads, feature_map)
    if causal:
        sums = causal_product(queries, keys, values)
    else:
        sums = torch.einsum("bthc,bhce->bthe", queries, context(keys, values))
    return _divided(sums, eps).flatten(2)


def _divided(sums: Tensor, eps: float) -> Tensor:
    """Divide the sums of values by the last channel, the sum of ones; float64 takes any eps."""
    if sums.dtype != torch.float64:
        eps = max(eps, MIN_EPS)
    return sums[..., :-1] / (sums[..., -1:] + eps)


NORMALIZED_LINEAR_ATTENTION, CAUSAL_NORMALIZED_LINEAR_ATTENTION = register_pair(
    "NormalizedLinearAttention", check=_check, compute=compute, reference=reference
)
