"""Linear attention with a normalizer in PyTorch; see ``mechanisms.linear_attention``."""

import torch
from torch import Tensor

from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.operators.numerics import (
    causal_product,
    check_grouped_heads,
    check_lengths,
    check_positive_eps,
    context,
    grouped_shapes,
    repeat_heads,
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
    feature_map: str,
    eps: float,
    normalizer: str,
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
    if normalizer != "none":
        check_positive_eps(op_type, eps)


def features(x: Tensor, feature_map: str) -> Tensor:
    """Return phi(x). Below 0 elu is exp(x), because elu(x) + 1 would lose small values."""
    if feature_map == "identity":
        return x
    if feature_map == "relu":
        return x.relu()
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def _projected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    num_heads: int,
    feature_map: str,
    normalizer: str,
    kv_num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features by head; with a normalizer the values have a last channel of ones."""
    heads = kv_num_heads or num_heads
    valid = valid_keys(lengths, key.shape[1])[..., None, None]
    queries = features(split_heads(query, num_heads), feature_map)
    keys = torch.where(valid, features(split_heads(key, heads), feature_map), 0)
    values = split_heads(value, heads)
    if normalizer != "none":
        values = torch.cat((values, torch.ones_like(values[..., :1])), 3)
    return queries, keys, values


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    feature_map: str,
    eps: float,
    normalizer: str,
    kv_num_heads: int,
    causal: bool,
) -> Tensor:
    """Compute the definition, row by row, from the similarities phi(Q[t]) . phi(K[u]).

    Args:
        query: ``[B, T, H * d]``.
        key, value: ``[B, S, G * d]`` and ``[B, S, G * e]`` of G heads.
        lengths: int64 ``[B]``.
        key_lengths: int64 ``[B]``, the counted keys; None for ``lengths``.
        num_heads: H.
        feature_map, eps, normalizer: see ``mechanisms.linear_attention``.
        kv_num_heads: G; 0 for H.
        causal: whether a row sees only the keys up to its own position.
    """
    counted = lengths if key_lengths is None else key_lengths
    queries, *pairs = _projected(
        query, key, value, counted, num_heads, feature_map, normalizer, kv_num_heads
    )
    keys, values = (repeat_heads(x, num_heads) for x in pairs)
    rows = []
    for t in range(query.shape[1]):
        end = t + 1 if causal else key.shape[1]
        similarity = torch.einsum("bhc,buhc->buh", queries[:, t], keys[:, :end])
        sums = torch.einsum("buh,buhe->bhe", similarity, values[:, :end])
        rows.append(_normalized(sums, normalizer, eps))
    return torch.stack(rows, 1).flatten(2)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    feature_map: str,
    eps: float,
    normalizer: str,
    kv_num_heads: int,
    causal: bool,
) -> Tensor:
    """Compute ``reference`` in time linear in T: keys and values are multiplied first."""
    counted = lengths if key_lengths is None else key_lengths
    queries, keys, values = _projected(
        query, key, value, counted, num_heads, feature_map, normalizer, kv_num_heads
    )
    if causal:
        keys, values = (repeat_heads(x, num_heads) for x in (keys, values))
        sums = causal_product(queries, keys, values)
    else:
        contexts = repeat_heads(context(keys, values), num_heads, 1)
        sums = torch.einsum("bthc,bhce->bthe", queries, contexts)
    return _normalized(sums, normalizer, eps).flatten(2)


def _normalized(sums: Tensor, normalizer: str, eps: float) -> Tensor:
    """Divide the sums of values by the last channel, the sum of ones."""
    if normalizer == "none":
        return sums
    eps = max(eps, MIN_EPS)
    total = sums[..., -1:]
    return sums[..., :-1] / (total.clamp(min=eps) if normalizer == "clamp" else total + eps)


NORMALIZED_LINEAR_ATTENTION, CAUSAL_NORMALIZED_LINEAR_ATTENTION = register_pair(
    "NormalizedLinearAttention",
    check=_check,
    compute=compute,
    reference=reference,
    shapes=grouped_shapes,
)
