"""AFT-conv in PyTorch; see ``mechanisms.aft_conv``."""

from dataclasses import dataclass
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
from aftexport.operators.torch_ops.torch_op import TwinCall, register_pair


@dataclass(frozen=True, kw_only=True, eq=False)
class _AftConv(TwinCall):
    """A call; ``key`` is ``[B, T, H]``.

    ``filter`` is ``[H, s]``; ``filter[h, j]`` is the bias of key ``t + j - (s-1)//2`` (causal
    ``t + j - (s-1)``).
    """

    filter: Tensor
    num_heads: int
    gate: str
    eps: float

    def check(self) -> None:
        check_same_shape(self.op_type, query=self.query, value=self.value)
        check_lengths(self.op_type, self.query, self.lengths)
        check_eps(self.op_type, self.eps)
        check_heads(self.op_type, self.query, self.num_heads)
        check_key_columns(self.op_type, self.query, self.key, self.num_heads)
        shape = tuple(self.filter.shape)
        if len(shape) != 2 or shape[0] != self.num_heads or shape[1] == 0:
            raise ValueError(
                f"{self.op_type}: filter must be [{self.num_heads}, s], got shape {shape}"
            )

    def reference(self) -> Tensor:
        """Compute the definition, row by row."""
        key, value = self._by_heads()
        mean = _means(key, value, self.filter, self.causal, self.eps)
        return apply_gate(self.gate, self.query, mean.flatten(2))

    def compute(self) -> Tensor:
        """Compute ``reference`` in time linear in T: a convolution, and running sums outside."""
        mean = guarded_mean(
            partial(_sums, causal=self.causal, eps=self.eps),
            partial(_means, causal=self.causal, eps=self.eps),
            *self._by_heads(),
            self.filter,
        )
        return apply_gate(self.gate, self.query, mean.flatten(2))

    def _by_heads(self) -> tuple[Tensor, Tensor]:
        return mask_keys(self.key, self.lengths), split_heads(self.value, self.num_heads)


def _left(filter: Tensor, causal: bool) -> int:
    taps = filter.shape[1]
    return taps - 1 if causal else (taps - 1) // 2


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


AFT_CONV, CAUSAL_AFT_CONV = register_pair("AftConv", _AftConv)
