"""The layer of Mamba-2."""

import torch
from torch import Tensor, nn

from aftexport.nn._projections import check_counts
from aftexport.nn._recurrent_layer import (
    DecayByTimeStep,
    RecurrentLayer,
    RootMeanSquareNorm,
    ShortConvolution,
)
from aftexport.operators.numerics import split_heads

_EXPANSION = 2


class Mamba2(RecurrentLayer):
    """The block of Mamba-2 (arXiv 2405.21060, sections 6 and 7.1; the authors' ``Mamba2``)::

        h_t = exp(dt_t A) h_{t-1} + B_t (dt_t x_t)^T,   A = -exp(A_log)
        dt_t = softplus(u_t W_dt + dt_bias)
        o_t = h_t^T C_t + D x_t,                        y_t = norm(o_t * silu(z_t)) W_o

    z, x, B, C and dt are projections of the input u. x, B and C pass a short convolution with a
    bias and ``silu``. There are ``2 * dim`` channels of x, and one B and C for all heads. ``norm``
    is the root mean square of all channels.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        state_size: the width N of B and C.
        conv_taps: taps of the short convolution.
        causal: whether a token sees only itself and earlier tokens; see ``RecurrentLayer``.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        state_size: int = 64,
        conv_taps: int = 4,
        causal: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, causal=causal, scale=1.0)
        check_counts("Mamba2", state_size=state_size)
        inner = _EXPANSION * dim
        self._widths = (inner, inner + 2 * state_size, num_heads)
        self._convolved = (inner, state_size, state_size)
        self.input = nn.Linear(dim, sum(self._widths), bias=False)
        self.convolution = ShortConvolution(sum(self._convolved), conv_taps, bias=True)
        self.decay = DecayByTimeStep(num_heads)
        self.D = nn.Parameter(torch.ones(num_heads, 1))
        self.norm = RootMeanSquareNorm(inner)
        self.output = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        gate, convolved, steps = self.input(x).split(self._widths, -1)
        values, key, query = self.convolution(convolved, lengths).split(self._convolved, -1)
        steps, decay = self.decay(steps)
        heads = split_heads(values, self.num_heads)
        mixed = self.recur(
            torch.cat([query] * self.num_heads, -1),
            torch.cat([key] * self.num_heads, -1),
            (heads * steps.unsqueeze(-1)).flatten(2),
            lengths,
            decay=decay,
        )
        mixed = mixed + (heads * self.D).flatten(2)
        return self.output(self.norm(mixed * nn.functional.silu(gate)))
