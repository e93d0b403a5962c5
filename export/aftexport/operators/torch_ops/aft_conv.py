"""AFT-conv in PyTorch; see ``mechanisms.aft_conv``."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

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
    largest,
    mask_keys,
    split_heads,
)
from aftexport.operators.torch_ops import _windowed as windowed
from aftexport.operators.torch_ops.torch_op import register_pair


def _check(
    op_type: str,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    filter: Tensor,
    lengths: Tensor,
    num_heads: int,
    gate: str,
    eps: float,
) -> None:
    check_same_shape(op_type, query=query, value=value)
    check_lengths(op_type, query, lengths)
    check_eps(op_type, eps)
    check_heads(op_type, query, num_heads)
    check_key_columns(op_type, query, key, num_heads)
    if filter.dim() != 2 or filter.shape[0] != num_heads or filter.shape[1] == 0:
        raise ValueError(
            f"{op_type}: filter must be [{num_heads}, s], got shape {tuple(filter.shape)}"
        )


def _left(filter: Tensor, causal: bool) -> int:
    taps = filter.shape[1]
    return taps - 1 if causal else (taps - 1) // 2


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    filter: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    gate: str,
    eps: float,
    causal: bool,
) -> Tensor:
    """Compute the definition, row by row.

    Args:
        query, value: ``[B, T, D]``.
        key: ``[B, T, H]``.
        filter: ``[H, s]``; ``filter[h, j]`` is the bias of key ``t + j - (s-1)//2``
            (causal ``t + j - (s-1)``).
        lengths: int64 ``[B]``.
        gate, eps: see ``mechanisms.aft_conv``.
        causal: whether a row sees only the keys up to its own position.
    """
    mean = _means(mask_keys(key, lengths), split_heads(value, num_heads), filter, causal, eps)
    return apply_gate(gate, query, mean.flatten(2))


def _means(key: Tensor, value: Tensor, filter: Tensor, causal: bool, eps: float) -> Tensor:
    bias = filter.T[None, :, :, None]
    return windowed.means(key[..., None], value, bias, _left(filter, causal), causal, eps)


def _sums(key: Tensor, value: Tensor, filter: Tensor, causal: bool, eps: float) -> Sums:
    heads, taps = filter.shape
    left = _left(filter, causal)
    weight, top = (x[..., None] for x in key_weights(key))
    pair = torch.cat((weight * value, weight), 3)
    filter_max = largest(filter).clamp(min=0)
    rows = pad(pair.permute(0, 3, 2, 1).flatten(0, 1), (left, taps - 1 - left))
    convolved = conv1d(rows, (filter - filter_max).exp()[:, None], groups=heads)
    inside = convolved.reshape(-1, pair.shape[3], heads, pair.shape[1]).permute(0, 3, 2, 1)
    sums = inside + (-filter_max).exp() * windowed.outside_sums(pair, left, taps, causal)
    return sums[..., :-1], denominators(sums[..., -1:], top, eps, filter_max)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    filter: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    gate: str,
    eps: float,
    causal: bool,
) -> Tensor:
    """Compute ``reference`` in time linear in T: a convolution, and running sums outside it."""
    mean = guarded_mean(
        partial(_sums, causal=causal, eps=eps),
        partial(_means, causal=causal, eps=eps),
        mask_keys(key, lengths),
        split_heads(value, num_heads),
        filter,
    )
    return apply_gate(gate, query, mean.flatten(2))


AFT_CONV, CAUSAL_AFT_CONV = register_pair(
    "AftConv", check=_check, compute=compute, reference=reference
)
