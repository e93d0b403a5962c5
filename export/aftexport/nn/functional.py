"""The recurrent operators on tensors with an axis of heads, as implementations in PyTorch have it.

A forward that calls these functions in place of a loop over chunks or tokens is captured for every
length.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

import aftexport.operators.torch_ops  # noqa: F401  registers the operators

_P = ParamSpec("_P")
_R = TypeVar("_R")
_IS_CAPTURING = ContextVar("is_capturing", default=False)
"""Whether this thread captures a model. Other threads run the functions themselves."""


def exported_as(form: Callable[_P, _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator: the capture of a model runs ``form`` in place of the function.

    The parity check runs the function itself, so it compares both forms::

        @exported_as(lambda q, k, v: recurrent_linear_attention(q, k, v)[0])
        def naive_linear_attention(q, k, v): ...

    Args:
        form: a function of the same arguments, with the same result.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return (form if _IS_CAPTURING.get() else function)(*args, **kwargs)

        return called

    return decorate


@contextmanager
def export_forms() -> Iterator[None]:
    """Run the second form of every function during the block, in this thread."""
    before = _IS_CAPTURING.set(True)
    try:
        yield
    finally:
        _IS_CAPTURING.reset(before)


__all__ = ["causal_depthwise_conv", "exported_as", "recurrent_linear_attention"]


def recurrent_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    past_state: Tensor | None = None,
    lengths: Tensor | None = None,
    direction: str = "forward",
    normalizer: str = "none",
    scale: float | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Compute linear attention by a recurrence over the tokens, and return its last state too.

    Without ``decay`` and ``beta`` this is plain linear attention; with ``decay`` it is gated (GLA,
    RetNet), with ``beta`` the delta rule, and with both the gated delta rule. Lightning attention
    and Mamba-2 are gated too, with ``scale=1.0``; the values of Mamba-2 are ``dt * x``. See
    docs/operators.md.

    Args:
        query: ``[B, T, Hq, dk]``.
        key: ``[B, T, Hk, dk]``. Heads of keys that are fewer than those of values are repeated,
            with their queries.
        value: ``[B, T, H, dv]``.
        decay: the logarithm of the decay at each token, ``[B, T, H]`` or ``[B, T, H, dk]``.
        beta: ``[B, T, H]``.
        past_state: the state before the first token, in the shape of the result; None for zeros.
        lengths: int64 ``[B]``, the tokens before the padding; None if all rows are computed.
        direction: ``forward``, ``reverse`` or ``bidirectional``.
        normalizer: ``none``, or ``sum`` for a division by the sum of the weights.
        scale: the factor of the queries; None for ``1 / sqrt(dk)``.
        eps: the number added to the sum of the weights.

    Returns:
        The output ``[B, T, Hq, dv]`` and the state ``[B, H, dk, dv]`` after all tokens. A
        ``normalizer`` adds a column, ``dv + 1``. A bidirectional state has ``2 * H`` heads, the
        forward ones first.
    """
    heads = value.shape[2]
    query, key = _repeated(query, heads), _repeated(key, heads)
    is_of_channels = decay is not None and decay.dim() == 4
    output, state = torch.ops.aftexport.recurrent_linear_attention(
        query.flatten(2),
        key.flatten(2),
        value.flatten(2),
        past_state,
        decay.flatten(2) if decay is not None and is_of_channels else decay,
        beta,
        _token_counts(value) if lengths is None else lengths,
        update_rule(decay, beta),
        direction,
        normalizer,
        "channel" if is_of_channels else "head",
        query.shape[2],
        heads,
        0.0 if scale is None else scale,
        eps,
    )
    return output.unflatten(2, (query.shape[2], value.shape[3])), state


def causal_depthwise_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    past_state: Tensor | None = None,
    lengths: Tensor | None = None,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with the tokens before it, and return the last inputs too.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, K]``.
        bias: ``[C]``.
        past_state: the ``K - 1`` inputs before the first token, ``[B, K - 1, C]``; None for zeros.
        lengths: int64 ``[B]``, the tokens before the padding; None if all rows are computed.
        activation: ``none`` or ``silu``.

    Returns:
        The output ``[B, T, C]`` and the last ``K - 1`` inputs.
    """
    counts = _token_counts(x) if lengths is None else lengths
    output, state = torch.ops.aftexport.causal_depthwise_conv(
        x, weight, bias, past_state, counts, activation
    )
    return output, state


def _token_counts(x: Tensor) -> Tensor:
    """Return int64 ``[B]``, the number of tokens of ``x [B, T, ...]`` for each document."""
    return torch.full(x.shape[:1], x.shape[1], dtype=torch.int64, device=x.device)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Return ``x [B, T, H, d]`` with each head repeated, if it has fewer heads."""
    times = heads // x.shape[2]
    if times <= 1:
        return x
    return x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)


_RULES = {
    (False, False): "linear",
    (True, False): "gated",
    (False, True): "delta",
    (True, True): "gated_delta",
}
"""Whether decay and beta are given, to the update rule."""


def update_rule(decay: Tensor | None, beta: Tensor | None) -> str:
    """Return the attribute ``update_rule`` of the operator for these inputs."""
    return _RULES[decay is not None, beta is not None]
