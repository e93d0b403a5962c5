"""AFT-local in PyTorch; see ``mechanisms.aft_local``."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from aftexport.operators.numerics import (
    Sums,
    check_eps,
    check_lengths,
    check_max_tokens,
    check_same_shape,
    denominators,
    key_weights,
    largest,
    long_product,
    mask_keys,
    outside_sums,
    windowed_means,
)
from aftexport.operators.torch_ops.torch_op import BiasedCall, register_pair


@dataclass(frozen=True, kw_only=True, eq=False)
class _AftLocal(BiasedCall):
    """A call with ``band [Tmax, 2s-1]`` (causal ``[Tmax, s]``), or one row for every t."""

    # band[t, j] is the bias of key t + j - (s-1). A single row is a relative bias.

    band: Tensor

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

    @property
    def _left(self) -> int:
        """The number of keys in a window before its own token."""
        width = self.band.shape[1]
        return width - 1 if self.causal else width // 2

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return mask_keys(self.key, self.lengths), self.value, self.band

    def means(self, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        key, value, bias = key[..., None], value[..., None], bias[..., None, None]
        return windowed_means(key, value, bias, self._left, self.causal, self.eps)[..., 0]

    def sums(self, key: Tensor, value: Tensor, bias: Tensor) -> Sums:
        """Return the sums in time linear in T: blocks of the band, running sums outside."""
        tokens, channels = key.shape[1:]
        width, left = bias.shape[1], self._left
        block = max(width, 32)
        context = block + width - 1
        blocks = -(-tokens // block)

        weight, top = key_weights(key)
        pair = torch.cat((weight * value, weight), 2)
        band = bias[:tokens].expand(tokens, width)
        row_max = largest(band).clamp(min=0)
        # Each row of the band is one element longer than a row of the block. Read with the
        # block's row length, it moves one column to the right per row: the diagonal band.
        rows = pad((band - row_max).exp(), (0, block, 0, blocks * block - tokens))
        diagonal = rows.reshape(blocks, -1)[:, : block * context].reshape(blocks, block, context)
        padded = pad(pair, (0, 0, left, blocks * block - tokens + width - 1 - left))
        contexts = padded.unfold(1, context, block).transpose(2, 3)
        inside = long_product(diagonal, contexts).flatten(1, 2)[:, :tokens]
        sums = inside + (-row_max).exp() * outside_sums(pair, left, width, self.causal)
        return sums[..., :channels], denominators(sums[..., channels:], top, self.eps, row_max)


PAIR = register_pair("AftLocal", _AftLocal)
