"""Parts that the layers of the operator ``RecurrentLinearAttention`` share."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from aftexport.nn._projections import check_counts, check_heads
from aftexport.nn.functional import update_rule
from aftexport.operators.numerics import split_heads

_EPS = 1e-6
_MAX_RATE, _TIME_STEPS = 16.0, (0.001, 0.1)
"""The initial rates of decay are in [1, 16], and the initial time steps in this range."""


class RecurrentLayer(nn.Module):
    """A token-mixing layer whose heads have a matrix as their state.

    Not causal, the layer reads the states of both directions with the same projections: ``o_t = q_t
    (S_t + R_t)``. S_t is the state of the tokens up to t, and R_t that of the later tokens, from
    last to first. A short convolution is causal in both cases, as in the papers.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        check_heads(type(self).__name__, dim, num_heads)
        self.num_heads = num_heads
        self.causal = causal
        self._scale = 0.0 if scale is None else scale

    def recur(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor,
        *,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
    ) -> Tensor:
        """Run the recurrence on ``[B, T, H * d]``; the decays are logarithms.

        A decay ``[B, T, H]`` is by head, and ``[B, T, H * dk]`` by channel. ``beta [B, T, H]`` is
        the strength of each write of a delta rule.
        """
        heads = self.num_heads
        by_channel = decay is not None and decay.shape[-1] != heads
        output, _ = torch.ops.aftexport.recurrent_linear_attention(
            query,
            key,
            value,
            None,
            decay,
            beta,
            lengths,
            update_rule(decay, beta),
            "forward" if self.causal else "bidirectional",
            "none",
            "channel" if by_channel else "head",
            heads,
            heads,
            self._scale,
            _EPS,
        )
        return output


class ShortConvolution(nn.Module):
    """A causal convolution of each channel, with SiLU."""

    def __init__(self, channels: int, taps: int, *, bias: bool = False) -> None:
        super().__init__()
        check_counts("ShortConvolution", channels=channels, taps=taps)
        bound = taps**-0.5
        self.weight = nn.Parameter(torch.empty(channels, taps).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Convolve ``x [B, T, C]``; ``lengths`` int64 ``[B]``."""
        op = torch.ops.aftexport.causal_depthwise_conv
        output, _ = op(x, self.weight, self.bias, None, lengths, "silu")
        return output


class RootMeanSquareNorm(nn.Module):
    """Normalization by the root mean square of the last axis, with a learned weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x [..., width]``; squares are computed in float32 or wider."""
        wide = x.float() if x.dtype.itemsize < 4 else x
        scale = (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt()
        return (wide * scale).to(x.dtype) * self.weight


class DecayByTimeStep(nn.Module):
    """The decay ``g = -exp(A_log) * softplus(a + dt_bias)`` of each head."""

    # exp(A_log) starts between 1 and 16, and softplus(dt_bias) between 0.001 and 0.1.

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        low, high = map(math.log, _TIME_STEPS)
        steps = torch.empty(num_heads).uniform_(low, high).exp()
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, _MAX_RATE).log())
        self.dt_bias = nn.Parameter(steps + (-(-steps).expm1()).log())  # inverse of softplus

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return the time steps and the logarithms of the decay, ``[B, T, H]``, of ``a``."""
        steps = nn.functional.softplus(a + self.dt_bias)
        return steps, -self.A_log.exp() * steps


def norm_heads(norm: Callable[[Tensor], Tensor], x: Tensor, num_heads: int) -> Tensor:
    """Return ``x [B, T, H * d]`` with ``norm`` applied to each head ``[B, T, H, d]``."""
    return norm(split_heads(x, num_heads)).flatten(2)


def unit_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return ``x [B, T, H * d]`` with each head divided by its Euclidean norm."""
    heads = split_heads(x, num_heads)
    wide = heads.float() if x.dtype.itemsize < 4 else heads
    scale = (wide.square().sum(-1, keepdim=True) + _EPS).rsqrt()
    return (wide * scale).to(x.dtype).flatten(2)


def fixed_decay(decay: Tensor, x: Tensor) -> Tensor:
    """Return the decay ``[H]`` for each token of ``x [B, T, *]``, ``[B, T, H]``."""
    return decay.to(x.dtype).expand(*x.shape[:2], -1)


class DeltaRuleLayer(RecurrentLayer):
    """A layer whose queries, keys and values pass a short convolution, before a delta rule."""

    def __init__(
        self, dim: int, num_heads: int, *, conv_taps: int = 4, causal: bool = False
    ) -> None:
        super().__init__(dim, num_heads, causal=causal)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.convolution = ShortConvolution(3 * dim, conv_taps)
        self.beta = nn.Linear(dim, num_heads, bias=False)
        self.norm = RootMeanSquareNorm(dim // num_heads)

    def normed_rows(self, x: Tensor, lengths: Tensor, decay: Tensor | None = None) -> Tensor:
        """Return the normalized results of the recurrence, ``[B, T, D]``."""
        query, key, value = self.convolution(self.query_key_value(x), lengths).chunk(3, -1)
        mixed = self.recur(
            unit_heads(query, self.num_heads),
            unit_heads(key, self.num_heads),
            value,
            lengths,
            decay=decay,
            beta=torch.sigmoid(self.beta(x)),
        )
        return norm_heads(self.norm, mixed, self.num_heads)
