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
) -> Array:
    """Vaswani et al., Attention Is All You Need, arXiv 1706.03762, eq. 1, over a window of keys.

    Padding is not read; a row that sees no key is 0. Padded rows are computed like the others.
    """
    exact = {n: x.astype(np.float64) for n, x in inputs.items() if x.dtype.kind == "f"}
    groups = kv_num_heads or num_heads
    keys, values = (np.split(exact[name], groups, 2) for name in ("key", "value"))
    counts = np.clip(inputs.get("key_lengths", inputs["lengths"]), 0, keys[0].shape[1])
    sinks = exact.get("sink", np.full(num_heads, -np.inf))
    heads = []
    for head, query in enumerate(np.split(exact["query"], num_heads, 2)):
        key, value = (x[head // (num_heads // groups)] for x in (keys, values))
        output = np.zeros((*query.shape[:2], value.shape[2]))
        for b, t in np.ndindex(query.shape[:2]):
            low = 0 if window_left < 0 else max(t - window_left, 0)
            high = counts[b] if window_right < 0 else min(t + window_right + 1, counts[b])
            if low >= high:
                continue
            scores = key[b, low:high] @ query[b, t] * (scale or key.shape[2] ** -0.5)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            if "bias" in exact:
                reach = exact["bias"].shape[1] // 2
                distance = np.clip(np.arange(low, high) - t, -reach, reach)
                scores = scores + exact["bias"][head, distance + reach]
            top = max(scores.max(), sinks[head])
            weights = np.exp(scores - top)
            output[b, t] = (
                weights @ value[b, low:high] / (weights.sum() + np.exp(sinks[head] - top))
            )
        heads.append(output)
    return np.concatenate(heads, 2)
