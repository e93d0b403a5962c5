"""The mechanisms by their formulas in float64 NumPy, for proofs on machines without torch.

``aftexport.operators.torch_ops`` has the same definitions in PyTorch, where they have gradients.
Each function takes the inputs of an operator in order, None for one that a node leaves out, and
then its attributes and ``causal`` by name. Rows of padding are computed like the others.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from aftexport.operators.mechanisms.linear_attention import MIN_EPS

Array = NDArray[np.float64]
Lengths = NDArray[np.int64]


def definition(op_type: str, attributes: Mapping[str, object]) -> Callable[..., Array]:
    """Return the definition of an operator with these attributes, as a function of its inputs."""
    compute = _DEFINITIONS[op_type.removeprefix("Causal")]
    causal = op_type.startswith("Causal")

    def run(*inputs: NDArray[np.generic] | None) -> Array:
        is_float = (x is not None and x.dtype.kind == "f" for x in inputs)
        wide = (
            x.astype(np.float64) if is_wide and x is not None else x
            for x, is_wide in zip(inputs, is_float, strict=True)
        )
        return compute(*wide, **attributes, causal=causal)

    return run


def _aft_full(
    query: Array,
    key: Array,
    value: Array,
    position_bias: Array,
    lengths: Lengths,
    *,
    gate: str,
    eps: float,
    causal: bool,
) -> Array:
    key, tokens = _masked(key, lengths), key.shape[1]
    mean = _row_means(key, value, lambda t: position_bias[t, :tokens, None], eps=eps, causal=causal)
    return _gate(gate, query) * mean


def _aft_local(
    query: Array,
    key: Array,
    value: Array,
    band: Array,
    lengths: Lengths,
    *,
    gate: str,
    eps: float,
    causal: bool,
) -> Array:
    left = band.shape[1] - 1 if causal else band.shape[1] // 2
    bias = _window(key.shape[1], left, band[:, :, None])
    return _gate(gate, query) * _row_means(
        _masked(key, lengths), value, bias, eps=eps, causal=causal
    )


def _aft_simple(
    query: Array,
    key: Array,
    value: Array,
    lengths: Lengths,
    *,
    gate: str,
    num_heads: int,
    eps: float,
    causal: bool,
) -> Array:
    logits, values = _masked(key, lengths)[..., None], _heads(value, key.shape[2])
    mean = _pool(logits, values, eps=eps, causal=causal).reshape(value.shape)
    return _gate(gate, query) * mean


def _aft_conv(
    query: Array,
    key: Array,
    value: Array,
    filter: Array,
    lengths: Lengths,
    *,
    num_heads: int,
    gate: str,
    eps: float,
    causal: bool,
) -> Array:
    taps = filter.shape[1]
    left = taps - 1 if causal else (taps - 1) // 2
    bias = _window(key.shape[1], left, filter.T[None, :, :, None])
    keys = _masked(key, lengths)[..., None]
    mean = _row_means(keys, _heads(value, num_heads), bias, eps=eps, causal=causal)
    return _gate(gate, query) * mean.reshape(value.shape)


def _efficient_attention(
    query: Array,
    key: Array,
    value: Array,
    lengths: Lengths,
    key_lengths: Lengths | None = None,
    *,
    num_heads: int,
    normalization: str,
    scale: float,
    kv_num_heads: int,
    causal: bool,
) -> Array:
    counted = lengths if key_lengths is None else key_lengths
    tokens, groups = key.shape[1], kv_num_heads or num_heads
    queries, values = _heads(query, num_heads), _repeated(_heads(value, groups), num_heads)
    rows = []
    if normalization == "scaling":
        valid = np.arange(tokens) < counted[:, None]
        keys = np.where(valid[..., None, None], _heads(key, groups), 0)
    else:
        queries = _softmax(queries, 3)
        keys = _heads(_masked(key, counted), groups)
    keys = _repeated(keys, num_heads)
    for end in range(1, tokens + 1) if causal else [tokens]:
        asking = queries[:, end - 1 : end] if causal else queries
        if normalization == "scaling":
            count = np.maximum(valid[:, :end].sum(1), 1)[:, None, None, None]
            weights = keys[:, :end] / count
        else:
            weights = _softmax(keys[:, :end], 1)
        context = np.einsum("bthc,bthe->bhce", weights, values[:, :end])
        rows.append(np.einsum("bthc,bhce->bthe", asking, context))
    return scale * np.concatenate(rows, 1).reshape(*query.shape[:2], -1)


def _fastformer(
    query: Array,
    key: Array,
    value: Array,
    alpha_weight: Array,
    beta_weight: Array,
    lengths: Lengths,
    *,
    num_heads: int,
    causal: bool,
) -> Array:
    scale = 1 / np.sqrt(query.shape[2] // num_heads)
    queries, keys, values = (_heads(x, num_heads) for x in (query, key, value))
    alpha = _masked(query @ alpha_weight * scale, lengths)[..., None]
    keyed = keys * _pool(alpha, queries, causal=causal)
    beta = _masked(keyed.reshape(key.shape) @ beta_weight * scale, lengths)[..., None]
    return (values * _pool(beta, keyed, causal=causal)).reshape(value.shape)


def _linear_attention(
    query: Array,
    key: Array,
    value: Array,
    lengths: Lengths,
    key_lengths: Lengths | None = None,
    *,
    num_heads: int,
    feature_map: str,
    eps: float,
    normalizer: str,
    kv_num_heads: int,
    causal: bool,
) -> Array:
    counted = lengths if key_lengths is None else key_lengths
    tokens, groups = key.shape[1], kv_num_heads or num_heads
    valid = (np.arange(tokens) < counted[:, None])[..., None, None]
    queries = _features(_heads(query, num_heads), feature_map)
    keys = np.where(valid, _features(_heads(key, groups), feature_map), 0)
    keys, values = (_repeated(x, num_heads) for x in (keys, _heads(value, groups)))
    if causal:
        similarity = np.tril(np.einsum("bthc,buhc->bhtu", queries, keys))
        sums = np.einsum("bhtu,buhe->bthe", similarity, values)
        total = similarity.sum(3).transpose(0, 2, 1)[..., None]
    else:
        # Images may have thousands of tokens, whose similarities do not fit into memory.
        sums = np.einsum("bthc,bhce->bthe", queries, np.einsum("buhc,buhe->bhce", keys, values))
        total = np.einsum("bthc,bhc->bth", queries, keys.sum(1))[..., None]
    eps = max(eps, float(np.float32(MIN_EPS)))
    divisors = {"add": total + eps, "clamp": np.maximum(total, eps), "none": np.ones_like(total)}
    mean: Array = sums / divisors[normalizer]
    return mean.reshape(*query.shape[:2], -1)


def _softmax_attention(
    query: Array,
    key: Array,
    value: Array,
    sink: Array | None,
    bias: Array | None,
    lengths: Lengths,
    key_lengths: Lengths | None = None,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    query_start: Lengths | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    interleaved: int,
    causal: bool,
) -> Array:
    counted = lengths if key_lengths is None else key_lengths
    groups = kv_num_heads or num_heads
    queries = _heads(query, num_heads)
    keys, values = (_repeated(_heads(x, groups), num_heads) for x in (key, value))
    start = 0 if query_start is None else int(query_start[0])
    places = start + np.arange(query.shape[1])
    if cos_cache is not None and sin_cache is not None:
        cos, sin = cos_cache[:, None], sin_cache[:, None]
        queries = _rotated(queries, cos[places], sin[places], interleaved)
        keys = _rotated(keys, cos[: key.shape[1]], sin[: key.shape[1]], interleaved)
    valid = np.arange(key.shape[1]) < counted[:, None]
    keys, values = (np.where(valid[..., None, None], x, 0) for x in (keys, values))
    logits = np.einsum("bthc,buhc->bhtu", queries, keys) * (scale or queries.shape[3] ** -0.5)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    distance = np.arange(key.shape[1]) - places[:, None]
    if bias is not None:
        reach = bias.shape[1] // 2
        logits = logits + bias[:, distance.clip(-reach, reach) + reach]
    seen = valid[:, None, None]
    seen = seen if window_left < 0 else seen & (distance >= -window_left)
    seen = seen if window_right < 0 else seen & (distance <= window_right)
    logits = np.where(seen, logits, -np.inf)
    if sink is not None:
        column = np.broadcast_to(sink[:, None, None], (*logits.shape[:3], 1))
        weights = _softmax(np.concatenate([logits, column], 3), 3)[..., :-1]
    else:
        weights = _softmax(logits, 3)
    mixed: Array = np.einsum("bhtu,buhe->bthe", weights, values)
    return mixed.reshape(*query.shape[:2], -1)


_DEFINITIONS: Mapping[str, Callable[..., Array]] = {
    "AftFull": _aft_full,
    "AftLocal": _aft_local,
    "AftSimple": _aft_simple,
    "AftConv": _aft_conv,
    "EfficientAttention": _efficient_attention,
    "Fastformer": _fastformer,
    "NormalizedLinearAttention": _linear_attention,
    "SoftmaxAttention": _softmax_attention,
}


def _masked(key: Array, lengths: Lengths) -> Array:
    """Return ``key [B, T, ...]`` with the logit -inf for padded keys."""
    valid = np.arange(key.shape[1]) < lengths[:, None]
    return np.where(valid.reshape(*valid.shape, *[1] * (key.ndim - 2)), key, -np.inf)


def _heads(x: Array, num_heads: int) -> Array:
    """Return ``x [B, T, D]`` as ``[B, T, H, D/H]``."""
    return x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads)


def _repeated(x: Array, heads: int) -> Array:
    """Return ``x [B, T, G, d]`` with each of G heads repeated, so that there are ``heads``."""
    return np.repeat(x, heads // x.shape[2], 2)


def _rotated(x: Array, cos: Array, sin: Array, interleaved: int) -> Array:
    """Return ``x [B, T, H, d]`` with its first channels rotated by tables ``[T, 1, r / 2]``."""
    width = 2 * cos.shape[-1]
    head, rest = x[..., :width], x[..., width:]
    first, second = (head[..., ::2], head[..., 1::2]) if interleaved else np.split(head, 2, -1)
    both = [first * cos - second * sin, second * cos + first * sin]
    turned = np.stack(both, -1).reshape(head.shape) if interleaved else np.concatenate(both, -1)
    return np.concatenate([turned, rest], -1)


def _gate(gate: str, query: Array) -> Array:
    if gate == "sigmoid":
        return np.exp(-np.logaddexp(0, -query))
    if gate == "relu":
        return np.maximum(query, 0)
    return np.tanh(query) if gate == "tanh" else np.ones_like(query)


def _features(x: Array, feature_map: str) -> Array:
    if feature_map == "identity":
        return x
    if feature_map == "relu":
        return np.maximum(x, 0)
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def _softmax(logits: Array, axis: int, eps: float = 0.0, shift: float | Array = 0.0) -> Array:
    """Return the softmax over an axis; it is 0 if every logit is -inf.

    ``eps`` is added to the sum of ``exp(logits + shift)``; logits had ``shift`` subtracted.
    """
    largest = np.maximum(logits.max(axis, keepdims=True), _LOWEST)
    weights = np.exp(logits - largest)
    total = weights.sum(axis, keepdims=True)
    if eps:
        total = total + np.exp(np.log(eps) - (largest + shift))
    probabilities: Array = weights / np.where(total == 0, 1, total)
    return probabilities


_LOWEST = np.finfo(np.float64).min


def _mean(key: Array, bias: Array, value: Array, eps: float) -> Array:
    """Return the mean of ``value`` by a softmax of ``key + bias`` over axis 1, which is kept.

    Both are taken relative to those of the largest logit first: beside 1e38 a number has no digits.
    """
    bias = np.broadcast_to(bias, key.shape)
    best = (key + bias).argmax(1, keepdims=True)
    best_key, best_bias = (
        np.maximum(np.take_along_axis(x, best, 1), _LOWEST / 2) for x in (key, bias)
    )
    relative = (key - best_key) + (bias - best_bias)
    weights = _softmax(relative, 1, eps, best_key + best_bias)
    mean: Array = (weights * value).sum(1, keepdims=True)
    return mean


def _row_means(
    key: Array, value: Array, bias_of: Callable[[int], Array], *, eps: float = 0.0, causal: bool
) -> Array:
    """Return the mean of each row t, whose keys have the biases ``bias_of(t)``, ``[T, ...]``."""
    rows = []
    for t in range(key.shape[1]):
        end = t + 1 if causal else key.shape[1]
        rows.append(_mean(key[:, :end], bias_of(t)[:end], value[:, :end], eps))
    return np.concatenate(rows, 1)


def _pool(logits: Array, value: Array, *, eps: float = 0.0, causal: bool) -> Array:
    """Return the mean of ``value`` by a softmax over the tokens, or over those up to each row."""
    if not causal:
        mean: Array = (_softmax(logits, 1, eps) * value).sum(1, keepdims=True)
        return np.broadcast_to(mean, value.shape)
    return _row_means(logits, value, lambda _: np.zeros_like(logits[0]), eps=eps, causal=True)


def _window(tokens: int, left: int, biases: Array) -> Callable[[int], Array]:
    """Return a function from a row to the biases of all keys, 0 outside the row's window.

    ``biases [T or 1, W, ...]`` are those of the keys ``t - left`` and on, for a row t.
    """

    def bias_of(t: int) -> Array:
        row = np.zeros((tokens, *biases.shape[2:]))
        first, last = max(t - left, 0), min(t - left + biases.shape[1], tokens)
        row[first:last] = biases[min(t, len(biases) - 1), first - t + left : last - t + left]
        return row

    return bias_of
