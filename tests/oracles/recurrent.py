"""The recurrent family by closed formulas, in float64 NumPy.

Each function takes the tensors of an operator by name and one document at a time. Nothing is
computed token by token: row t sums over the tokens that it sees, and the delta rule solves one
system for all tokens. Padding is not read, and its rows are 0.
"""

from collections.abc import Mapping

import numpy as np
from numpy import ndarray as Array

Results = tuple[Array, Array]


def recurrent_linear_attention(
    inputs: Mapping[str, Array],
    *,
    direction: str,
    normalizer: str,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float,
    eps: float,
    **_: str,
) -> Results:
    """Return the output and the states; Yang et al., arXiv 2312.06635 and arXiv 2412.06464.

        S_t = exp(g_t) S_(t-1) + k_t v'_t,  v'_t = v_t or beta_t (v_t - k_t exp(g_t) S_(t-1))

    A token counts with the decays after it. In the reverse direction of ``bidirectional``, a row
    does not see its own token.
    """
    query, value = inputs["query"], inputs["value"]
    width = value.shape[2] // kv_num_heads
    output = np.zeros((*query.shape[:2], q_num_heads * width))
    ways = ("forward", "reverse") if direction == "bidirectional" else (direction,)
    channels = query.shape[2] // q_num_heads
    states = np.zeros(
        (len(query), len(ways) * kv_num_heads, channels, width + (normalizer == "sum"))
    )
    if "past_state" in inputs:
        states[:] = inputs["past_state"]
    for document, length in enumerate(np.clip(inputs["lengths"], 0, query.shape[1])):
        for head in range(q_num_heads):
            own = head // (q_num_heads // kv_num_heads)
            read = 0.0
            for place, way in enumerate(ways):
                step = 1 if way == "forward" else -1
                tokens = _head(inputs, document, own, kv_num_heads, normalizer == "sum")
                tokens = {n: x[:length].astype(float)[::step] for n, x in tokens.items()}
                q = query[document, :length, head * channels :][:, :channels].astype(float)[::step]
                past = states[document, place * kv_num_heads + own].copy()
                rows, last = _recurrence(q, past, own_token=place == 0, **tokens)
                read = read + rows[::step]
                if head % (q_num_heads // kv_num_heads) == q_num_heads // kv_num_heads - 1:
                    states[document, place * kv_num_heads + own] = last
            columns = slice(head * width, (head + 1) * width)
            if normalizer == "sum":
                output[document, :length, columns] = read[:, :-1] / (read[:, -1:] + eps)
            else:
                output[document, :length, columns] = read * (scale or channels**-0.5)
    return output, states


def _head(
    inputs: Mapping[str, Array], document: int, head: int, heads: int, summed: bool
) -> dict[str, Array]:
    tokens = {}
    for name in ("key", "value", "decay", "beta"):
        if name in inputs:
            x = inputs[name][document]
            tokens[name] = x if x.shape[1] == 1 else np.split(x, heads, axis=1)[head]
    if summed:
        value = tokens["value"]
        tokens["value"] = np.concatenate((value, np.ones_like(value[:, :1])), 1)
    return tokens


def _recurrence(
    query: Array,
    past: Array,
    *,
    key: Array,
    value: Array,
    decay: Array | None = None,
    beta: Array | None = None,
    own_token: bool,
) -> Results:
    count, channels = key.shape
    decay = np.zeros((count, 1)) if decay is None else decay
    decay = np.broadcast_to(decay, (count, channels))
    after = np.array(
        [[np.exp(decay[u + 1 : t + 1].sum(0)) for u in range(count)] for t in range(count)]
    ).reshape(count, count, channels)
    start = np.exp(np.cumsum(decay, 0))
    if beta is not None:
        pairs = np.tril(np.einsum("tc,tuc,uc->tu", key, after, key), -1)
        missing = beta * (value - (start * key) @ past)
        value = np.linalg.solve(np.eye(count) + beta * pairs, missing)
    seen = np.tril(np.einsum("tc,tuc,uc->tu", query, after, key), 0 if own_token else -1)
    rows = (start * query) @ past + seen @ value
    if not count:
        return rows, past
    return rows, start[-1][:, None] * past + (after[-1] * key).T @ value


def causal_depthwise_conv(inputs: Mapping[str, Array], *, activation: str) -> Results:
    """Return the convolution of each channel by ``np.convolve``, and the last inputs."""
    x, weight = inputs["input"], inputs["weight"].astype(float)
    taps = weight.shape[1]
    output = np.zeros(x.shape)
    states = np.zeros((len(x), taps - 1, x.shape[2]))
    if "past_state" in inputs:
        states[:] = inputs["past_state"]
    for document, length in enumerate(np.clip(inputs["lengths"], 0, x.shape[1])):
        joined = np.concatenate((states[document], x[document, :length].astype(float)))
        states[document] = joined[length:]
        for channel in range(x.shape[2] if length else 0):
            row = np.convolve(joined[:, channel], weight[channel, ::-1], "valid")
            row = row + (inputs["bias"][channel] if "bias" in inputs else 0)
            output[document, :length, channel] = (
                row / (1 + np.exp(-row)) if activation == "silu" else row
            )
    return output, states
