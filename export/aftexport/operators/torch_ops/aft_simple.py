"""AFT-simple in PyTorch; see ``mechanisms.aft_simple``."""

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
    """Compute the definition: a softmax over the valid keys, channel by channel.

    Args:
        query, value: ``[B, T, D]``.
        key: ``[B, T, D]``, or ``[B, T, num_heads]``.
        lengths: int64 ``[B]``.
        gate, num_heads, eps: see ``mechanisms.aft_simple``.
        causal: whether a row sees only the keys up to its own position.
    """
    logits, values = _by_head(key, value, lengths)
    if not causal:
        mean = softmax_mean(logits, values, eps).expand_as(values)
    else:
        mean = _prefix_means(logits, values, eps)
    return apply_gate(gate, query, mean.flatten(2))


def _by_head(key: Tensor, value: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masked keys ``[B, T, H, 1]`` and the values ``[B, T, H, D / H]``."""
    return mask_keys(key, lengths)[..., None], split_heads(value, key.shape[2])


def _prefix_means(key: Tensor, value: Tensor, eps: float) -> Tensor:
    ends = range(1, key.shape[1] + 1)
    return torch.cat([softmax_mean(key[:, :t], value[:, :t], eps) for t in ends], 1)


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
    logits, values = _by_head(key, value, lengths)
    if causal:
        mean = guarded_mean(
            partial(prefix_sums, eps=eps), partial(_prefix_means, eps=eps), logits, values
        )
    else:
        mean = softmax_mean(logits, values, eps).expand_as(values)
    return apply_gate(gate, query, mean.flatten(2))


def prefix_sums(logits: Tensor, value: Tensor, eps: float = 0.0) -> Sums:
    """Return running sums of ``exp(logits) value`` and ``exp(logits)`` over dim 1, scaled alike.

    ``eps`` is added to the sums of the weights.
    """
    weight, top = key_weights(logits)
    return (weight * value).cumsum(1), denominators(weight.cumsum(1), top, eps)


AFT_SIMPLE, CAUSAL_AFT_SIMPLE = register_pair(
    "AftSimple", check=_check, compute=compute, reference=reference
)
