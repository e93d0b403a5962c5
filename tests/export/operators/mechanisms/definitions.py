"""The mechanisms' formulas in float64 NumPy, from the papers, over every pair of tokens.

Nothing here is shared with the package. ``rows`` picks the query positions to
compute; a document of no tokens gives NaN, for the formulas say nothing of it.
"""

from collections.abc import Callable

import numpy as np
from numpy import ndarray as Array


def counting_keys(lengths: Array, tokens: int, rows: Array, causal: bool) -> Array:
    """Return for each row the keys that count: bool ``[B, R, T]``."""
    keys = np.arange(tokens)
    counts = keys < np.clip(lengths, 0, tokens)[:, None, None]
    if causal:
        counts = counts & (keys <= rows[None, :, None])
    return np.broadcast_to(counts, (len(lengths), len(rows), tokens))


def softmax(logits: Array, axis: int) -> Array:
    with np.errstate(invalid="ignore"):  # a row of nothing but -inf
        weight = np.exp(logits - logits.max(axis, keepdims=True))
    return weight / weight.sum(axis, keepdims=True)


def weighted_mean(logits: Array, value: Array, counts: Array) -> Array:
    """``sum_u exp(logits[t,u]) value[u] / sum_u exp(logits[t,u])`` for ``logits [B, R, T, C]``."""
    weight = softmax(np.where(counts[..., None], logits, -np.inf), axis=2)
    return np.einsum("btuc,buc->btc", weight, value)


def gated(gate: str, query: Array, mean: Array) -> Array:
    if gate == "none":
        return mean
    return mean * (np.tanh(query) if gate == "tanh" else 0.5 * (1 + np.tanh(query / 2)))


def aft(inputs: dict[str, Array], bias: Array, rows: Array, gate: str, causal: bool) -> Array:
    """Compute any AFT; ``bias`` is ``[R, T, 1 or D]``, keys need not be repeated by head."""
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    key = np.repeat(key, value.shape[2] // key.shape[2], axis=2)
    counts = counting_keys(inputs["lengths"], key.shape[1], rows, causal)
    mean = weighted_mean(key[:, None] + bias, value, counts)
    return gated(gate, query[:, rows], mean)


def bias_in_window(biases: Array, rows: Array, tokens: int, left: int) -> Array:
    """``[R, T]``: for row t, key ``t + j - left`` has ``biases[t, j]``, every other key 0.

    Biases of one row are those of every t.
    """
    bias = np.zeros((len(rows), tokens))
    for index, t in enumerate(rows):
        for j, value in enumerate(biases[t if len(biases) > 1 else 0]):
            if 0 <= t + j - left < tokens:
                bias[index, t + j - left] = value
    return bias


def aft_full(inputs: dict[str, Array], rows: Array, *, gate: str, causal: bool) -> Array:
    bias = inputs["position_bias"][rows, : inputs["key"].shape[1], None]
    return aft(inputs, bias, rows, gate, causal)


def aft_local(inputs: dict[str, Array], rows: Array, *, gate: str, causal: bool) -> Array:
    band = inputs["band"]
    window = band.shape[1] if causal else (band.shape[1] + 1) // 2
    bias = bias_in_window(band, rows, inputs["key"].shape[1], window - 1)
    return aft(inputs, bias[..., None], rows, gate, causal)


def aft_simple(inputs: dict[str, Array], rows: Array, *, gate: str, causal: bool) -> Array:
    return aft(inputs, np.zeros((1, 1, 1)), rows, gate, causal)


def aft_conv(
    inputs: dict[str, Array], rows: Array, *, num_heads: int, gate: str, causal: bool
) -> Array:
    taps, tokens = inputs["filter"].shape[1], inputs["key"].shape[1]
    left = taps - 1 if causal else (taps - 1) // 2
    by_head = [bias_in_window(taps[None], rows, tokens, left) for taps in inputs["filter"]]
    width = inputs["value"].shape[2] // num_heads
    return aft(inputs, np.repeat(np.stack(by_head, 2), width, axis=2), rows, gate, causal)


def efficient_attention(
    inputs: dict[str, Array],
    rows: Array,
    *,
    num_heads: int,
    normalization: str,
    scale: float,
    causal: bool,
) -> Array:
    tokens = inputs["key"].shape[1]
    counts = counting_keys(inputs["lengths"], tokens, rows, causal)
    heads = []
    for query, key, value in _heads(num_heads, inputs["query"], inputs["key"], inputs["value"]):
        if normalization == "softmax":
            asking = softmax(query[:, rows], axis=2)
            logits = np.where(counts[..., None], key[:, None], -np.inf)
            similarity = np.einsum("btc,btuc->btu", asking, softmax(logits, axis=2))
        else:
            n = counts.sum(2, keepdims=True).clip(min=1)
            similarity = np.einsum("btc,buc->btu", query[:, rows], key) * counts / n
        heads.append(similarity @ value)
    return scale * np.concatenate(heads, 2)


def fastformer(inputs: dict[str, Array], rows: Array, *, num_heads: int, causal: bool) -> Array:
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    tokens, channels = query.shape[1:]
    width = channels // num_heads
    counts = counting_keys(inputs["lengths"], tokens, np.arange(tokens), causal)

    def pool(x: Array, weight: Array) -> Array:
        logits = np.repeat(x @ weight / np.sqrt(width), width, axis=2)
        return weighted_mean(logits[:, None], x, counts)

    keyed = key * pool(query, inputs["alpha_weight"])
    return (value * pool(keyed, inputs["beta_weight"]))[:, rows]


def linear_attention(
    inputs: dict[str, Array],
    rows: Array,
    *,
    num_heads: int,
    feature_map: str,
    eps: float,
    causal: bool,
) -> Array:
    def phi(x: Array) -> Array:
        if feature_map == "relu":
            return np.maximum(x, 0)
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    counts = counting_keys(inputs["lengths"], inputs["key"].shape[1], rows, causal)
    heads = []
    for query, key, value in _heads(num_heads, inputs["query"], inputs["key"], inputs["value"]):
        similarity = np.einsum("btc,buc->btu", phi(query[:, rows]), phi(key)) * counts
        heads.append(similarity @ value / (similarity.sum(2, keepdims=True) + eps))
    return np.concatenate(heads, 2)


def _heads(num_heads: int, *tensors: Array) -> list[tuple[Array, ...]]:
    return list(zip(*(np.split(x, num_heads, axis=2) for x in tensors), strict=True))


DEFINITIONS: dict[str, Callable[..., Array]] = {
    function.__name__: function
    for function in (
        aft_full,
        aft_local,
        aft_simple,
        aft_conv,
        efficient_attention,
        fastformer,
        linear_attention,
    )
}
"""By the mechanism's stem."""
