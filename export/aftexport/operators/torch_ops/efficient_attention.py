"""Efficient Attention in PyTorch; see ``mechanisms.efficient_attention``."""

import torch
from torch import Tensor

from aftexport.operators.numerics import (
    Sums,
    causal_product,
    check_grouped_heads,
    check_lengths,
    context,
    denominators,
    divisor,
    grouped_shapes,
    guarded_mean,
    key_weights,
    largest,
    mask_keys,
    repeat_heads,
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
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    normalization: str,
    scale: float,
    kv_num_heads: int,
) -> None:
    check_grouped_heads(
        op_type,
        query,
        key,
        value,
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        key_lengths=key_lengths,
    )
    check_lengths(op_type, query, lengths)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    normalization: str,
    scale: float,
    kv_num_heads: int,
    causal: bool,
) -> Tensor:
    """Compute the definition; the causal form row by row.

    Args:
        query: ``[B, T, H * d]``.
        key, value: ``[B, S, G * d]`` and ``[B, S, G * e]`` of G heads.
        lengths: int64 ``[B]``.
        key_lengths: int64 ``[B]``, the counted keys; None for ``lengths``.
        num_heads: H.
        normalization, scale: see ``mechanisms.efficient_attention``.
        kv_num_heads: G; 0 for H.
        causal: whether a row sees only the keys up to its own position.
    """
    if normalization == "scaling":
        return compute(
            query, key, value, lengths, key_lengths, num_heads=num_heads,
            normalization=normalization, scale=scale, kv_num_heads=kv_num_heads, causal=causal,
        )  # fmt: skip
    heads = kv_num_heads or num_heads
    counted = lengths if key_lengths is None else key_lengths
    queries = split_heads(query, num_heads).softmax(3)
    keys = repeat_heads(split_heads(mask_keys(key, counted), heads), num_heads)
    values = repeat_heads(split_heads(value, heads), num_heads)
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
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    normalization: str,
    scale: float,
    kv_num_heads: int,
    causal: bool,
) -> Tensor:
    """Compute ``reference`` in time linear in T, also for the causal form."""
    heads = kv_num_heads or num_heads
    counted = lengths if key_lengths is None else key_lengths
    queries, values = split_heads(query, num_heads), split_heads(value, heads)
    if normalization == "scaling":
        result = _scaled(queries, split_heads(key, heads), values, counted, causal)
        return scale * result.flatten(2)
    keys = split_heads(mask_keys(key, counted), heads)
    asking = queries.softmax(3)
    if causal:
        keys, values = (repeat_heads(x, num_heads) for x in (keys, values))
        result = guarded_mean(_causal_sums, _causal_rows, asking, keys, values)
    else:
        weight = (keys - largest(keys)).exp()
        means = context(weight, values) / divisor(weight.sum(1))[..., None]
        result = torch.einsum("bthc,bhce->bthe", asking, repeat_heads(means, num_heads, 1))
    return scale * result.flatten(2)


def _scaled(queries: Tensor, keys: Tensor, values: Tensor, counted: Tensor, causal: bool) -> Tensor:
    """Return the products ``Q K^T V`` over the number of keys, by head."""
    num_heads = queries.shape[2]
    valid = valid_keys(counted, keys.shape[1])
    keys = torch.where(valid[..., None, None], keys, 0)
    if causal:
        count = valid.to(queries.dtype).cumsum(1).clamp(min=1)
        keys, values = (repeat_heads(x, num_heads) for x in (keys, values))
        return causal_product(queries, keys, values) / count[..., None, None]
    count = counted.clamp(1, keys.shape[1])[:, None, None, None]
    contexts = repeat_heads(context(keys, values) / count, num_heads, 1)
    product: Tensor = torch.einsum("bthc,bhce->bthe", queries, contexts)
    return product


def _causal_sums(queries: Tensor, keys: Tensor, values: Tensor) -> Sums:
    # Each key channel has its own denominator, so the queries are divided by channel.
    # The guard only tests the smallest denominator of each row.
    weight, top = key_weights(keys)
    total = denominators(weight.cumsum(1), top)
    least = total.amin(3, keepdim=True)
    return causal_product(queries * (least / total), weight, values), least


def _causal_rows(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    ends = range(1, keys.shape[1] + 1)
    return torch.cat([_attend(queries, keys, values, end, True) for end in ends], 1)


EFFICIENT_ATTENTION, CAUSAL_EFFICIENT_ATTENTION = register_pair(
    "EfficientAttention",
    check=_check,
    compute=compute,
    reference=reference,
    shapes=grouped_shapes,
)
