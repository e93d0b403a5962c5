"""AFT-conv in PyTorch; see ``mechanisms.aft_conv``."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from aftexport.operators.numerics import (
    Sums,
    check_eps,
    check_heads,
    check_key_columns,
    check_lengths,
    check_same_shape,
    denominators,
    key_weights,
    largest,
    mask_keys,
    outside_sums,
    split_heads,
    windowed_means,
)
from aftexport.operators.torch_ops.torch_op import BiasedCall, register_pair


@dataclass(frozen=True, kw_only=True, eq=False)
class _AftConv(BiasedCall):
    """A call with ``key [B, T, H]`` and ``filter [H, s]``."""

    # filter[h, j] is the bias of key t + j - (s-1)//2 (causal: t + j - (s-1)).

    filter: Tensor
    num_heads: int

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

    @property
    def _left(self) -> int:
        """The number of keys in a window before its own token."""
        taps = self.filter.shape[1]
        return taps - 1 if self.causal else (taps - 1) // 2

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        values = split_heads(self.value, self.num_heads)
        return mask_keys(self.key, self.lengths), values, self.filter

    def means(self, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        bias = bias.T[None, :, :, None]
        return windowed_means(key[..., None], value, bias, self._left, self.causal, self.eps)

    def sums(self, key: Tensor, value: Tensor, bias: Tensor) -> Sums:
        """Return the sums in time linear in T: a convolution, and running sums outside."""
        heads, taps = bias.shape
        left = self._left
        weight, top = (x[..., None] for x in key_weights(key))
        pair = torch.cat((weight * value, weight), 3)
        filter_max = largest(bias).clamp(min=0)
        rows = pad(pair.permute(0, 3, 2, 1).flatten(0, 1), (left, taps - 1 - left))
        convolved = conv1d(rows, (bias - filter_max).exp()[:, None], groups=heads)
        inside = convolved.reshape(-1, pair.shape[3], heads, pair.shape[1]).permute(0, 3, 2, 1)
        sums = inside + (-filter_max).exp() * outside_sums(pair, left, taps, self.causal)
        return sums[..., :-1], denominators(sums[..., -1:], top, self.eps, filter_max)


PAIR = register_pair("AftConv", _AftConv)
