"""Softmax attention by its formula, row by row in float64 NumPy."""

from collections.abc import Mapping

import numpy as np
from numpy import ndarray as Array


def softmax_attention(
    inputs: Mapping[str, Array],
    *,
    num_heads: int,
    scale: float = 0,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0,
    kv_num_heads: int = 0,
    interleaved: int = 0,
) -> tuple[Array, Array]:
    """Vaswani et al., Attention Is All You Need, arXiv 1706.03762, eq. 1, over a window of keys.

    Returns the rows and the logarithms of their divisors. Padding is not read; a row that sees no
    key is 0. Padded rows are computed like the others.
    """
    exact = {n: x.astype(np.float64) for n, x in inputs.items() if x.dtype.kind == "f"}
    groups = kv_num_heads or num_heads
    queries = np.split(exact["query"], num_heads, 2)
    keys, values = (np.split(exact[name], groups, 2) for name in ("key", "value"))
    counts = np.clip(inputs.get("key_lengths", inputs["lengths"]), 0, keys[0].shape[1])
    sinks = exact.get("sink", np.full(num_heads, -np.inf))
    (start,) = inputs.get("query_start", [0])
    if "cos_cache" in exact:
        angles = exact["cos_cache"] + 1j * exact["sin_cache"]
        queries = [rotated(x, angles, start, interleaved) for x in queries]
        keys = [rotated(x, angles, 0, interleaved) for x in keys]
    outputs, log_sums = [], []
    for head, query in enumerate(queries):
        key, value = (x[head // (num_heads // groups)] for x in (keys, values))
        output = np.zeros((*query.shape[:2], value.shape[2]))
        log_sum = np.full(query.shape[:2], sinks[head])
        for b, row in np.ndindex(query.shape[:2]):
            t = row + start
            low = 0 if window_left < 0 else max(t - window_left, 0)
            high = counts[b] if window_right < 0 else min(t + window_right + 1, counts[b])
            if low >= high:
                continue
            scores = key[b, low:high] @ query[b, row] * (scale or key.shape[2] ** -0.5)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            if "bias" in exact:
                reach = exact["bias"].shape[1] // 2
                distance = np.clip(np.arange(low, high) - t, -reach, reach)
                scores = scores + exact["bias"][head, distance + reach]
            top = max(scores.max(), sinks[head])
            weights = np.exp(scores - top)
            divisor = weights.sum() + np.exp(sinks[head] - top)
            output[b, row] = weights @ value[b, low:high] / divisor
            log_sum[b, row] = top + np.log(divisor)
        outputs.append(output)
        log_sums.append(log_sum)
    return np.concatenate(outputs, 2), np.stack(log_sums, 2)


def rotated(x: Array, angles: Array, start: int, interleaved: int) -> Array:
    """Su et al., RoFormer, arXiv 2104.09864, eq. 34, by complex numbers; x is ``[B, T, d]``."""
    half = angles.shape[1]
    rows = np.clip(np.arange(x.shape[1]) + start, 0, len(angles) - 1)
    places = np.arange(2 * half).reshape((half, 2) if interleaved else (2, half))
    real, imaginary = places.T if interleaved else places
    turned = (x[..., real] + 1j * x[..., imaginary]) * angles[rows]
    result = x.copy()
    result[..., real], result[..., imaginary] = turned.real, turned.imag
    return result
