"""AFT-simple in PyTorch; see ``mechanisms.aft_simple``."""

import torch
from torch import Tensor

from aftexport.operators.numerics import (
    Sums,
    apply_gate,
    check_lengths,
    check_same_shape,
    guarded_mean,
    key_weights,
    mask_keys,
    softmax_mean,
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
) -> None:
    check_same_shape(op_type, query=query, key=key, value=value)
    check_lengths(op_type, query, lengths)


def reference(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, gate: str, causal: bool
) -> Tensor:
    """Compute the definition: a softmax over the valid keys, channel by channel.

    Args:
        query, key, value: ``[B, T, D]``.
        lengths: int64 ``[B]``.
    """
    key = mask_keys(key, lengths)
    if not causal:
        return apply_gate(gate, query, softmax_mean(key, value).expand_as(value))
    return apply_gate(gate, query, _prefix_means(key, value))


def _prefix_means(key: Tensor, value: Tensor) -> Tensor:
    ends = range(1, key.shape[1] + 1)
    return torch.cat([softmax_mean(key[:, :t], value[:, :t]) for t in ends], 1)


def compute(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, gate: str, causal: bool
) -> Tensor:
    """Compute ``reference``; the causal form uses running sums."""
    key = mask_keys(key, lengths)
    if causal:
        return apply_gate(gate, query, guarded_mean(prefix_sums, _prefix_means, key, value))
    return apply_gate(gate, query, softmax_mean(key, value).expand_as(value))


def prefix_sums(logits: Tensor, value: Tensor) -> Sums:
    """Return running sums of ``exp(logits) value`` and ``exp(logits)`` over dim 1, scaled alike."""
    weight, is_none = key_weights(logits)
    return (weight * value).cumsum(1), torch.where(is_none, 1, weight.cumsum(1))


AFT_SIMPLE, CAUSAL_AFT_SIMPLE = register_pair(
    "AftSimple", check=_check, compute=compute, reference=reference
)
