"""AFT-simple in PyTorch; see ``mechanisms.aft_simple``."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aftexport.operators.numerics import (
    Sums,
    apply_gate,
    check_eps,
    check_heads,
    check_key_columns,
    check_lengths,
    check_same_shape,
    denominators,
    guarded_mean,
    key_weights,
    mask_keys,
    softmax_mean,
    split_heads,
)
from aftexport.operators.torch_ops.torch_op import register_pair


def _check(
    op_type: str,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    gate: str,
    num_heads: int,
    eps: float,
) -> None:
    check_same_shape(op_type, query=query, value=value)
    check_lengths(op_type, query, lengths)
    check_eps(op_type, eps)
    columns = query.shape[2]
    if num_heads:
        check_heads(op_type, query, num_heads)
        columns = num_heads
    check_key_columns(op_type, query, key, columns)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    gate: str,
    num_heads: int,
    eps: float,
    causal: bool,
) -> Tensor:
    """Compute the definition; the causal form computes each prefix separately.

    Args:
        query, value: ``[B, T, D]``.
        key: ``[B, T, D]``, or ``[B, T, num_heads]``.
        lengths: int64 ``[B]``.
        gate, num_heads, eps: see ``mechanisms.aft_simple``.
        causal: whether a row sees only the keys up to its own position.
    """
    mean = prefix_means if causal else softmax_mean
    return _run(mean, query, key, value, lengths, gate, eps)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    gate: str,
    num_heads: int,
    eps: float,
    causal: bool,
) -> Tensor:
    """Compute ``reference``; the causal form uses running sums."""
    mean = running_means if causal else softmax_mean
    return _run(mean, query, key, value, lengths, gate, eps)


def _run(
    mean: Callable[[Tensor, Tensor, float], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    gate: str,
    eps: float,
) -> Tensor:
    """Multiply the gate by ``mean`` of keys ``[B, T, H, 1]`` and values ``[B, T, H, D / H]``."""
    values = split_heads(value, key.shape[2])
    means = mean(mask_keys(key, lengths)[..., None], values, eps)
    return apply_gate(gate, query, means.expand_as(values).flatten(2))


def prefix_means(logits: Tensor, value: Tensor, eps: float = 0.0) -> Tensor:
    """Return ``softmax_mean`` of every prefix of dim 1, each computed separately."""
    ends = range(1, logits.shape[1] + 1)
    return torch.cat([softmax_mean(logits[:, :end], value[:, :end], eps) for end in ends], 1)


def running_means(logits: Tensor, value: Tensor, eps: float = 0.0) -> Tensor:
    """Return ``prefix_means``, computed with running sums."""
    return guarded_mean(
        partial(_prefix_sums, eps=eps), partial(prefix_means, eps=eps), logits, value
    )


def _prefix_sums(logits: Tensor, value: Tensor, eps: float) -> Sums:
    """Return running sums of ``exp(logits) value`` and ``exp(logits)`` over dim 1, scaled alike.

    ``eps`` is added to the sums of the weights.
    """
    weight, top = key_weights(logits)
    return (weight * value).cumsum(1), denominators(weight.cumsum(1), top, eps)


AFT_SIMPLE, CAUSAL_AFT_SIMPLE = register_pair(
    "AftSimple", check=_check, compute=compute, reference=reference
)
