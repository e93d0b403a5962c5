"""Efficient Attention in PyTorch; see ``mechanisms.efficient_attention``."""

import torch
from torch import Tensor

from aftexport.operators.numerics import (
    Sums,
    causal_product,
    check_heads,
    check_lengths,
    check_same_shape,
    context,
    divisor,
    guarded_mean,
    key_weights,
    largest,
    mask_keys,
    softmax,
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
    normalization: str,
    scale: float,
) -> None:
    check_same_shape(op_type, query=query, key=key, value=value)
    check_lengths(op_type, query, lengths)
    check_heads(op_type, query, num_heads)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    normalization: str,
    scale: float,
    causal: bool,
) -> Tensor:
    """Compute the definition; the causal form row by row.

    Args:
        query, key, value: ``[B, T, D]``.
        lengths: int64 ``[B]``.
    """
    if normalization == "scaling":
        return compute(
            query, key, value, lengths, num_heads=num_heads, normalization=normalization,
            scale=scale, causal=causal,
        )  # fmt: skip
    queries = split_heads(query, num_heads).softmax(3)
    keys = split_heads(mask_keys(key, lengths), num_heads)
    values = split_heads(value, num_heads)
    ends = range(1, key.shape[1] + 1) if causal else [key.shape[1]]
    rows = [_attend(queries, keys, values, end, causal) for end in ends]
    return scale * torch.cat(rows, 1).flatten(2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, end: int, causal: bool) -> Tensor:
    context = torch.einsum("bthc,bthe->bhce", softmax(keys[:, :end]), values[:, :end])
    asking = queries[:, end - 1 : end] if causal else queries
    return torch.einsum("bthc,bhce->bthe", asking, context)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    normalization: str,
    scale: float,
    causal: bool,
) -> Tensor:
    """Compute ``reference`` in time linear in T, also for the causal form."""
    queries, keys, values = (split_heads(x, num_heads) for x in (query, key, value))
    if normalization == "scaling":
        valid = valid_keys(lengths, query.shape[1])
        keys = torch.where(valid[..., None, None], keys, 0)
        if causal:
            count = valid.to(query.dtype).cumsum(1).clamp(min=1)
            result = causal_product(queries, keys, values) / count[..., None, None]
        else:
            count = lengths.clamp(1, query.shape[1])[:, None, None, None]
            result = torch.einsum("bthc,bhce->bthe", queries, context(keys, values) / count)
        return scale * result.flatten(2)
    keys = split_heads(mask_keys(key, lengths), num_heads)
    asking = queries.softmax(3)
    if causal:
        result = guarded_mean(_causal_sums, _causal_rows, asking, keys, values)
    else:
        weight = (keys - largest(keys)).exp()
        means = context(weight, values) / divisor(weight.sum(1))[..., None]
        result = torch.einsum("bthc,bhce->bthe", asking, means)
    return scale * result.flatten(2)


def _causal_sums(queries: Tensor, keys: Tensor, values: Tensor) -> Sums:
    # Each key channel has its own denominator, so the queries are divided by channel.
    # The guard only tests the smallest denominator of each row.
    weight, is_none = key_weights(keys)
    total = torch.where(is_none, 1, weight.cumsum(1))
    least = total.amin(3, keepdim=True)
    return causal_product(queries * (least / total), weight, values), least


def _causal_rows(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    ends = range(1, keys.shape[1] + 1)
    return torch.cat([_attend(queries, keys, values, end, True) for end in ends], 1)


EFFICIENT_ATTENTION, CAUSAL_EFFICIENT_ATTENTION = register_pair(
    "EfficientAttention", check=_check, compute=compute, reference=reference
)
