"""AFT-local in PyTorch; see ``mechanisms.aft_local``."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from aftexport.operators.numerics import (
    Sums,
    apply_gate,
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
from aftexport.operators.torch_ops import _windowed as windowed
from aftexport.operators.torch_ops.torch_op import TwinCall, register_pair


@dataclass(frozen=True, kw_only=True, eq=False)
class _AftLocal(TwinCall):
    """A call.

    ``band`` is ``[Tmax, 2s-1]`` (causal ``[Tmax, s]``); ``band[t, j]`` is the bias of key
    ``t + j - (s-1)``. A single row serves every t: a relative bias.
    """

    band: Tensor
    gate: str
    eps: float

    def check(self) -> None:
        check_same_shape(self.op_type, query=self.query, key=self.key, value=self.value)
        check_lengths(self.op_type, self.query, self.lengths)
        check_eps(self.op_type, self.eps)
        shape = tuple(self.band.shape)
        if len(shape) != 2 or shape[1] == 0 or (not self.causal and shape[1] % 2 == 0):
            width = "[Tmax or 1, s]" if self.causal else "[Tmax or 1, 2s-1]"
            raise ValueError(f"{self.op_type}: band must be {width}, got shape {shape}")
        if shape[0] != 1:
            check_max_tokens(self.op_type, self.query, "band", shape[0])

    def reference(self) -> Tensor:
        """Compute the definition, row by row."""
        key = mask_keys(self.key, self.lengths)
        mean = _means(key, self.value, self.band, self.causal, self.eps)
        return apply_gate(self.gate, self.query, mean)

    def compute(self) -> Tensor:
        """Compute ``reference`` in time linear in T: blocks of the band, running sums outside."""
        mean = guarded_mean(
            partial(_sums, causal=self.causal, eps=self.eps),
            partial(_means, causal=self.causal, eps=self.eps),
            mask_keys(self.key, self.lengths),
            self.value,
            self.band,
        )
        return apply_gate(self.gate, self.query, mean)


def _left(band: Tensor, causal: bool) -> int:
    return band.shape[1] - 1 if causal else band.shape[1] // 2


def _means(key: Tensor, value: Tensor, band: Tensor, causal: bool, eps: float) -> Tensor:
    key, value, bias = key[..., None], value[..., None], band[..., None, None]
    return windowed.means(key, value, bias, _left(band, causal), causal, eps)[..., 0]


def _sums(key: Tensor, value: Tensor, band: Tensor, causal: bool, eps: float) -> Sums:
    tokens, channels = key.shape[1:]
    width, left = band.shape[1], _left(band, causal)
    block = max(width, 32)
    context = block + width - 1
    blocks = -(-tokens // block)

    weight, top = key_weights(key)
    pair = torch.cat((weight * value, weight), 2)
    band = band[:tokens].expand(tokens, width)
    row_max = largest(band).clamp(min=0)
    # Each row of the band is one element longer than a row of the block. Read with the
    # block's row length, it moves one column to the right per row: the diagonal band.
    rows = pad((band - row_max).exp(), (0, block, 0, blocks * block - tokens))
    diagonal = rows.reshape(blocks, -1)[:, : block * context].reshape(blocks, block, context)
    padded = pad(pair, (0, 0, left, blocks * block - tokens + width - 1 - left))
    contexts = padded.unfold(1, context, block).transpose(2, 3)
    inside = long_product(diagonal, contexts).flatten(1, 2)[:, :tokens]
    sums = inside + (-row_max).exp() * windowed.outside_sums(pair, left, width, causal)
    return sums[..., :channels], denominators(sums[..., channels:], top, eps, row_max)


AFT_LOCAL, CAUSAL_AFT_LOCAL = register_pair("AftLocal", _AftLocal)
