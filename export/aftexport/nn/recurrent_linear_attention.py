"""The layers of the operator ``RecurrentLinearAttention``, and the parts that they share.

They are Gated Linear Attention, retention, Lightning Attention, DeltaNet, Gated DeltaNet and
Mamba-2.
"""

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

    Not causal, the layer reads the states of both directions with the same projections:
    ``o_t = q_t (S_t + R_t)``. S_t is the state of the tokens up to t, and R_t that of the later
    tokens, from last to first. A short convolution is causal in both cases, as in the papers.
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


_GATE_RANK = 16
_TEMPERATURE = 16.0


class GatedLinearAttention(RecurrentLayer):
    """Gated Linear Attention, GLA (arXiv 2312.06635, eq. 3 and section 4.4)::

        S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   g_t = log sigmoid(x_t W_1 W_2 + b) / 16
        o_t = S_t^T q_t / sqrt(dk),                 y_t = (silu(x_t W_r + b_r) * norm(o_t)) W_o

    The gate has rank 16 and a decay for each channel of the keys, whose heads have half the width
    of the values, rounded up. ``norm`` is the root mean square of each head, as in the authors'
    code.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        causal: whether a token sees only itself and earlier tokens; see ``RecurrentLayer``.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(self, dim: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__(dim, num_heads, causal=causal)
        keys = num_heads * -(-dim // num_heads // 2)
        self.query = nn.Linear(dim, keys, bias=False)
        self.key = nn.Linear(dim, keys, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.decay = nn.Sequential(
            nn.Linear(dim, _GATE_RANK, bias=False), nn.Linear(_GATE_RANK, keys)
        )
        self.output_gate = nn.Linear(dim, dim)
        self.norm = RootMeanSquareNorm(dim // num_heads)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        decay = nn.functional.logsigmoid(self.decay(x)) / _TEMPERATURE
        mixed = self.recur(self.query(x), self.key(x), self.value(x), lengths, decay=decay)
        normed = norm_heads(self.norm, mixed, self.num_heads)
        return self.output(nn.functional.silu(self.output_gate(x)) * normed)


_GROUP_NORM_EPS = 1e-5


class Retention(RecurrentLayer):
    """Multi-scale retention of RetNet (arXiv 2307.08621, eq. 6 and 8)::

        S_t = gamma_h S_{t-1} + k_t v_t^T,   gamma_h = 1 - 2^(-5 - h) for head h = 0, 1, ...
        o_t = S_t^T q_t / sqrt(dk),          y_t = (silu(x_t W_g) * norm(o_t)) W_o

    ``norm`` is the group norm with a group for each head. The rotation of queries and keys by
    their positions (xPos) is left out, so documents of any length run in chunks.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        causal: whether a token sees only itself and earlier tokens; see ``RecurrentLayer``.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    decay: Tensor

    def __init__(self, dim: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__(dim, num_heads, causal=causal)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output_gate = nn.Linear(dim, dim, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(dim))
        self.norm_bias = nn.Parameter(torch.zeros(dim))
        self.output = nn.Linear(dim, dim, bias=False)
        heads = torch.arange(num_heads, dtype=torch.float64)
        self.register_buffer("decay", torch.log1p(-(2.0 ** (-5 - heads))))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        mixed = self.recur(
            self.query(x), self.key(x), self.value(x), lengths, decay=fixed_decay(self.decay, x)
        )
        heads = split_heads(mixed, self.num_heads)
        normed = nn.functional.layer_norm(heads, heads.shape[-1:], eps=_GROUP_NORM_EPS).flatten(2)
        normed = normed * self.norm_weight + self.norm_bias
        return self.output(nn.functional.silu(self.output_gate(x)) * normed)


class LightningAttention(RecurrentLayer):
    """Lightning Attention of TransNormerLLM and MiniMax-01 (arXiv 2401.04658, 2501.08313)::

        S_t = exp(-s_h) S_{t-1} + k_t v_t^T,   s_h = slope_scale * 2^(-8 h / H) for head h = 1..H
        o_t = S_t^T q_t,                       y_t = (sigmoid(x_t W_g) * norm(o_t)) W_o

    Queries, keys and values are ``silu`` of their projections, and ``norm`` is the root mean square
    of all channels.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        slope_scale: the factor of the slopes of a layer. In a model it is
            ``1 - l / (L - 1) + 1e-5`` for layer l = 0..L-1.
        causal: whether a token sees only itself and earlier tokens; see ``RecurrentLayer``.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    decay: Tensor

    def __init__(
        self, dim: int, num_heads: int, *, slope_scale: float = 1.0, causal: bool = False
    ) -> None:
        super().__init__(dim, num_heads, causal=causal, scale=1.0)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.output_gate = nn.Linear(dim, dim, bias=False)
        self.norm = RootMeanSquareNorm(dim)
        self.output = nn.Linear(dim, dim, bias=False)
        heads = torch.arange(1, num_heads + 1, dtype=torch.float64)
        slopes = slope_scale * 2.0 ** (-8 * heads / num_heads)
        self.register_buffer("decay", -slopes)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        query, key, value = nn.functional.silu(self.query_key_value(x)).chunk(3, -1)
        mixed = self.recur(query, key, value, lengths, decay=fixed_decay(self.decay, x))
        return self.output(torch.sigmoid(self.output_gate(x)) * self.norm(mixed))


class DeltaNet(DeltaRuleLayer):
    """DeltaNet (arXiv 2406.06484, section 3)::

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,   beta_t = sigmoid(x_t W_b)
        o_t = S_t^T q_t / sqrt(dk),                           y_t = norm(o_t) W_o

    Queries, keys and values pass a short convolution and ``silu``. Each head's queries and keys
    have the Euclidean norm 1. ``norm`` is the root mean square of each head.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        conv_taps: taps of the short convolution.
        causal: whether a token sees only itself and earlier tokens; see ``RecurrentLayer``.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(
        self, dim: int, num_heads: int, *, conv_taps: int = 4, causal: bool = False
    ) -> None:
        super().__init__(dim, num_heads, conv_taps=conv_taps, causal=causal)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        return self.output(self.normed_rows(x, lengths))


class GatedDeltaNet(DeltaRuleLayer):
    """Gated DeltaNet (arXiv 2412.06464, eq. 10 and section 3)::

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
        g_t = -exp(A_log) softplus(x_t W_a + dt_bias),   beta_t = sigmoid(x_t W_b)
        o_t = S_t^T q_t / sqrt(dk),                      y_t = (silu(x_t W_g) * norm(o_t)) W_o

    Queries, keys and values pass a short convolution and ``silu``. Each head's queries and keys
    have the Euclidean norm 1. ``norm`` is the root mean square of each head. Keys and values have
    ``dim`` channels.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        conv_taps: taps of the short convolution.
        causal: whether a token sees only itself and earlier tokens; see ``RecurrentLayer``.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(
        self, dim: int, num_heads: int, *, conv_taps: int = 4, causal: bool = False
    ) -> None:
        super().__init__(dim, num_heads, conv_taps=conv_taps, causal=causal)
        self.time_step = nn.Linear(dim, num_heads, bias=False)
        self.decay = DecayByTimeStep(num_heads)
        self.output_gate = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        _, decay = self.decay(self.time_step(x))
        normed = self.normed_rows(x, lengths, decay)
        return self.output(nn.functional.silu(self.output_gate(x)) * normed)


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
