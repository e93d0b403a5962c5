"""The formulas of the operators in float64, written plainly."""

from collections.abc import Callable
from typing import Any

import numpy as np


def _gate(name: str, x: np.ndarray) -> np.ndarray:
    if name == "sigmoid":
        return np.exp(-np.logaddexp(0.0, -x))
    return np.tanh(x) if name == "tanh" else np.ones_like(x)


def _allowed(tokens: int, length: int, causal: bool) -> np.ndarray:
    """[T, T]: whether key u counts for row t."""
    t, u = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    return (u < length) & ((u <= t) | (not causal))


def _weighted_mean(logits: np.ndarray, allowed: np.ndarray, value: np.ndarray) -> np.ndarray:
    """sum_u softmax_u(logits[t, u, c]) value[u, c], 0 where no key counts; by channel."""
    out = np.zeros_like(value)
    for c in range(value.shape[1]):
        x = np.where(allowed, logits[..., c], -np.inf)
        highest = x.max(axis=1, keepdims=True)
        weight = np.where(allowed, np.exp(x - np.where(np.isfinite(highest), highest, 0)), 0)
        total = weight.sum(axis=1)
        out[:, c] = weight @ value[:, c] / np.where(total > 0, total, 1)
    return out


def _documents(definition: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def over_batch(inputs: list[np.ndarray], causal: bool = False, **attributes: Any) -> np.ndarray:
        *tensors, lengths = inputs
        tensors = [x.astype(np.float64) for x in tensors]
        rows = [
            definition(
                [x[b] if x.ndim == 3 else x for x in tensors],
                max(0, min(int(n), tensors[0].shape[1])),
                causal,
                **attributes,
            )
            for b, n in enumerate(lengths)
        ]
        return np.stack(rows)

    return over_batch


@_documents
def aft_full(
    inputs: list[np.ndarray], length: int, causal: bool, gate: str = "sigmoid"
) -> np.ndarray:
    q, k, v, w = inputs
    tokens = len(q)
    logits = k[None, :, :] + w[:tokens, :tokens, None]
    return _gate(gate, q) * _weighted_mean(logits, _allowed(tokens, length, causal), v)


def _offset_bias(tokens: int, bias_of: Callable[[int, int], float | None]) -> np.ndarray:
    """[T, T] whose entry (t, u) is bias_of(t, u), 0 where that is None."""
    w = np.zeros((tokens, tokens))
    for t in range(tokens):
        for u in range(tokens):
            bias = bias_of(t, u)
            w[t, u] = 0.0 if bias is None else bias
    return w


@_documents
def aft_local(
    inputs: list[np.ndarray], length: int, causal: bool, gate: str = "sigmoid"
) -> np.ndarray:
    q, k, v, band = inputs
    tokens, width = len(q), band.shape[1]
    s = width if causal else (width + 1) // 2

    def bias(t: int, u: int) -> float | None:
        j = u - t + s - 1
        return band[0 if len(band) == 1 else t, j] if 0 <= j < width else None

    logits = k[None, :, :] + _offset_bias(tokens, bias)[:, :, None]
    return _gate(gate, q) * _weighted_mean(logits, _allowed(tokens, length, causal), v)


@_documents
def aft_simple(
    inputs: list[np.ndarray], length: int, causal: bool, gate: str = "sigmoid"
) -> np.ndarray:
    q, k, v = inputs
    logits = np.broadcast_to(k[None, :, :], (len(q), *k.shape))
    return _gate(gate, q) * _weighted_mean(logits, _allowed(len(q), length, causal), v)


@_documents
def aft_conv(
    inputs: list[np.ndarray], length: int, causal: bool, num_heads: int, gate: str = "sigmoid"
) -> np.ndarray:
    q, k, v, filters = inputs
    tokens, taps = len(q), filters.shape[1]
    width = q.shape[1] // num_heads
    left = taps - 1 if causal else (taps - 1) // 2
    out = np.zeros_like(q)
    for h in range(num_heads):

        def bias(t: int, u: int, h: int = h) -> float | None:
            j = u - t + left
            return filters[h, j] if 0 <= j < taps else None

        logits = k[None, :, h : h + 1] + _offset_bias(tokens, bias)[:, :, None]
        channels = slice(h * width, (h + 1) * width)
        logits = np.broadcast_to(logits, (tokens, tokens, width))
        out[:, channels] = _weighted_mean(logits, _allowed(tokens, length, causal), v[:, channels])
    return _gate(gate, q) * out


def _softmax(x: np.ndarray, axis: int, mask: np.ndarray | bool = True) -> np.ndarray:
    x = np.where(mask, x, -np.inf)
    highest = x.max(axis=axis, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(highest), highest, 0))
    total = e.sum(axis=axis, keepdims=True)
    return e / np.where(total > 0, total, 1)


@_documents
def efficient_attention(
    inputs: list[np.ndarray],
    length: int,
    causal: bool,
    num_heads: int,
    normalization: str = "softmax",
    scale: float = 1.0,
) -> np.ndarray:
    q, k, v = inputs
    tokens, width = len(q), q.shape[1] // num_heads
    allowed = _allowed(tokens, length, causal)
    out = np.zeros_like(q)
    for h in range(num_heads):
        channels = slice(h * width, (h + 1) * width)
        if normalization == "softmax":
            rho_q = _softmax(q[:, channels], 1)
            pooled = np.stack(
                [
                    _weighted_mean(
                        np.broadcast_to(k[None, :, [c]], (tokens, tokens, 1)).repeat(width, 2),
                        allowed,
                        v[:, channels],
                    )
                    for c in range(h * width, (h + 1) * width)
                ]
            )  # [c, t, channel of v]
            out[:, channels] = scale * np.einsum("tc,cte->te", rho_q, pooled)
        else:
            scores = np.where(allowed, q[:, channels] @ k[:, channels].T, 0)
            out[:, channels] = (
                scale * scores @ v[:, channels] / np.maximum(allowed.sum(1, keepdims=True), 1)
            )
    return out


@_documents
def linear_attention(
    inputs: list[np.ndarray],
    length: int,
    causal: bool,
    num_heads: int,
    feature_map: str = "elu",
    eps: float = 1e-6,
) -> np.ndarray:
    q, k, v = inputs
    width = q.shape[1] // num_heads

    def phi(x: np.ndarray) -> np.ndarray:
        return (
            np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
            if feature_map == "elu"
            else np.maximum(x, 0)
        )

    allowed = _allowed(len(q), length, causal)
    out = np.zeros_like(q)
    for h in range(num_heads):
        channels = slice(h * width, (h + 1) * width)
        scores = np.where(allowed, phi(q[:, channels]) @ phi(k[:, channels]).T, 0)
        out[:, channels] = scores @ v[:, channels] / (scores.sum(1, keepdims=True) + eps)
    return out


@_documents
def fastformer(inputs: list[np.ndarray], length: int, causal: bool, num_heads: int) -> np.ndarray:
    q, k, v, alpha_weight, beta_weight = inputs
    tokens, width = len(q), q.shape[1] // num_heads
    allowed = _allowed(tokens, length, causal)

    def pool(rows: np.ndarray, logits: np.ndarray) -> np.ndarray:
        out = np.zeros_like(rows)
        for h in range(num_heads):
            weight = _softmax(np.broadcast_to(logits[None, :, h], (tokens, tokens)), 1, allowed)
            channels = slice(h * width, (h + 1) * width)
            out[:, channels] = weight @ rows[:, channels]
        return out

    p = k * pool(q, q @ alpha_weight / np.sqrt(width))
    return v * pool(p, p @ beta_weight / np.sqrt(width))


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
    deviation = x - x.mean(-1, keepdims=True)
    return deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + epsilon) * weight + bias
