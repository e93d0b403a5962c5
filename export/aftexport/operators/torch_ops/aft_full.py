"""AFT-full in PyTorch; see ``mechanisms.aft_full``."""

from functools import partial

import torch
from torch import Tensor

from aftexport.operators.domain import MASKED
from aftexport.operators.numerics import (
    Sums,
    apply_gate,
    biased_mean,
    check_eps,
    check_lengths,
    check_max_tokens,
    check_same_shape,
    denominators,
    guarded_mean,
    key_weights,
    largest,
    long_product,
    mask_keys,
)
from aftexport.operators.torch_ops.torch_op import register_pair


def _check(
    op_type: str,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    lengths: Tensor,
    gate: str,
    eps: float,
) -> None:
    check_same_shape(op_type, query=query, key=key, value=value)
    check_lengths(op_type, query, lengths)
    check_eps(op_type, eps)
    if position_bias.dim() != 2 or position_bias.shape[0] != position_bias.shape[1]:
        raise ValueError(
            f"{op_type}: position_bias must be square, got shape {tuple(position_bias.shape)}"
        )
    check_max_tokens(op_type, query, "position_bias", position_bias.shape[0])


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    lengths: Tensor,
    *,
    gate: str,
    eps: float,
    causal: bool,
) -> Tensor:
    """Compute the definition, row by row.

    Args:
        query, key, value: ``[B, T, D]``.
        position_bias: ``[Tmax, Tmax]``, row for the query, column for the key.
        lengths: int64 ``[B]``.
        gate, eps: see ``mechanisms.aft_full``.
        causal: whether a row sees only the keys up to its own position.
    """
    return apply_gate(
        gate, query, _means(mask_keys(key, lengths), value, position_bias, causal, eps)
    )


def _means(key: Tensor, value: Tensor, position_bias: Tensor, causal: bool, eps: float) -> Tensor:
    tokens = key.shape[1]
    rows = []
    for t in range(tokens):
        end = t + 1 if causal else tokens
        bias = position_bias[t, :end, None]
        rows.append(biased_mean(key[:, :end], bias, value[:, :end], eps))
    return torch.cat(rows, 1)


def _sums(key: Tensor, value: Tensor, position_bias: Tensor, causal: bool, eps: float) -> Sums:
    tokens = key.shape[1]
    bias = position_bias[:tokens, :tokens]
    if causal:
        bias = torch.where(torch.ones_like(bias, dtype=torch.bool).tril(), bias, MASKED)
    bias_max = largest(bias)
    bias_weight = (bias - bias_max).exp()
    key_weight, top = key_weights(key)
    sums = long_product(bias_weight, torch.cat((key_weight * value, key_weight), 2))
    numerator, denominator = sums.chunk(2, 2)
    return numerator, denominators(denominator, top, eps, bias_max)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    lengths: Tensor,
    *,
    gate: str,
    eps: float,
    causal: bool,
) -> Tensor:
    """Compute ``reference`` as one matrix product; the maxima of keys and biases are separate."""
    mean = guarded_mean(
        partial(_sums, causal=causal, eps=eps),
        partial(_means, causal=causal, eps=eps),
        mask_keys(key, lengths),
        value,
        position_bias,
    )
    return apply_gate(gate, query, mean)


AFT_FULL, CAUSAL_AFT_FULL = register_pair(
    "AftFull", check=_check, compute=compute, reference=reference
)
