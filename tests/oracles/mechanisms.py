"""The attention mechanisms by the formulas of their papers, in float64 NumPy.

Each function takes the tensors of an operator by name, for a batch of documents, and sums over
every pair of a row and a key. Beyond the papers:

- Key u of a document counts for row t if u < length, and u <= t in causal form.
- Padding is not read, and its rows are 0.
- A mean over no keys, or over keys of -inf, is 0.
- eps of attention-free forms is added to a sum of exp(K + w) as the formula has it.
- Finite numbers of any size keep their digits: a key of 0.5 counts beside a bias of -1e38.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps

import numpy as np
from numpy import ndarray as Array

MIN_EPS = 1e-20
"""A smaller eps of linear attention counts as this one."""


@dataclass(frozen=True)
class Document:
    """One document of N tokens in float64, without padding.

    Attributes:
        rows: the R positions to compute, each below N.
        query, value: ``[N, C]``; linear and Efficient Attention may have other numbers of keys.
        key: ``[N, C]``, or ``[N, heads]`` of AFT-conv and of AFT-simple with heads.
        causal: whether row t sees the keys up to t only.
    """

    rows: Array
    query: Array
    key: Array
    value: Array
    causal: bool

    def visible(self, rows: Array) -> Array:
        """Return for each row the keys that count: bool ``[R, N]``."""
        return (np.arange(len(self.key)) <= rows[:, None]) | (not self.causal)


SEQUENCES = ("query", "key", "value")


def _over_batch(formula: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function of a batch, from a formula for one document and its further tensors."""

    @wraps(formula)
    def compute(
        inputs: Mapping[str, Array],
        *,
        causal: bool = False,
        rows: Array | None = None,
        **attributes: int | float | str,
    ) -> Array:
        tokens = inputs["query"].shape[1]
        rows = np.arange(tokens) if rows is None else rows
        exact = {name: x.astype(np.float64) for name, x in inputs.items() if x.dtype.kind == "f"}
        shared = {name: x for name, x in exact.items() if name not in SEQUENCES}
        lengths = np.clip(inputs["lengths"], 0, tokens)
        keys = np.clip(inputs.get("key_lengths", lengths), 0, inputs["key"].shape[1])
        groups = attributes.get("kv_num_heads", 0)
        repeats = attributes["num_heads"] // groups if groups else 1
        output = np.zeros((len(lengths), len(rows), inputs["value"].shape[2] * repeats))
        for b, (length, count) in enumerate(zip(lengths, keys, strict=True)):
            counted = rows < length
            if counted.any() and count > 0:
                query = exact["query"][b, :length]
                key, value = (exact[name][b, :count] for name in ("key", "value"))
                document = Document(rows[counted], query, key, value, causal)
                output[b, counted] = formula(document, **shared, **attributes)
        return output

    return compute


def softmax(logits: Array, axis: int, eps: float = 0, shift: Array | float = 0) -> Array:
    """Return ``exp(x) / (sum exp(x) + eps)``, x = logits + shift; 0 where all logits are -inf."""
    highest = logits.max(axis, keepdims=True)
    finite = np.where(highest == -np.inf, 0, highest)
    weights = np.exp(logits - finite)
    total = weights.sum(axis, keepdims=True)
    if eps > 0:
        # Above exp(700) eps is so far beyond the sum of weights that the result is 0.
        total = total + np.exp(np.minimum(np.log(eps) - finite - shift, 700))
    return weights / np.where(total == 0, 1, total)


def softmax_of_sum(key: Array, bias: Array, visible: Array, eps: float = 0) -> Array:
    """Return the softmax over u of ``key[u] + bias[t, u]``, for ``bias`` and ``visible [R, N]``.

    The numbers of the largest logit are subtracted from both terms first. Beside 1e38 the other
    term would have no digits.
    """
    logits = np.where(visible, key + bias, -np.inf)
    largest = logits.argmax(1)[:, None]
    seen = np.take_along_axis(logits, largest, 1) > -np.inf
    largest_key = np.where(seen, key[largest], 0)
    largest_bias = np.where(seen, np.take_along_axis(bias, largest, 1), 0)
    relative = (key - largest_key) + (bias - largest_bias)
    return softmax(np.where(visible, relative, -np.inf), 1, eps, largest_key + largest_bias)


def _gate(name: str, query: Array) -> Array:
    gates: dict[str, Callable[[Array], Array]] = {
        "sigmoid": lambda x: np.exp(-np.logaddexp(0, -x)),
        "tanh": np.tanh,
        "none": np.ones_like,
        "relu": lambda x: np.maximum(x, 0),
    }
    return gates[name](query)


def _attention_free(d: Document, biases: Array, gate: str, eps: float) -> Array:
    """Return the form that all AFT have in common, for each column of the key.

        Y_t = gate(Q_t) * sum_u exp(K_u + w_tu) V_u / (sum_u exp(K_u + w_tu) + eps)

    Args:
        d: the document.
        biases: ``[1 or columns of the key, R, N]``, w for each column.
        gate: sigmoid in the paper; the others occur in public code, and so does an eps.
    """
    visible, columns = d.visible(d.rows), d.key.shape[1]
    biases = np.broadcast_to(biases, (columns, *visible.shape))
    values = np.split(d.value, columns, axis=1)
    means = [
        softmax_of_sum(key, bias, visible, eps) @ value
        for key, bias, value in zip(d.key.T, biases, values, strict=True)
    ]
    return _gate(gate, d.query[d.rows]) * np.concatenate(means, axis=1)


def _window(d: Document, biases: Array, left: int) -> Array:
    """Return w ``[R, N]``: key ``t + j - left`` has ``biases[t, j]``, a key outside has 0.

    One row of biases stands for every t.
    """
    t, u = d.rows[:, None], np.arange(len(d.key))
    j = u - t + left
    inside = (j >= 0) & (j < biases.shape[1])
    return np.where(inside, biases[t if len(biases) > 1 else 0, np.where(inside, j, 0)], 0)


@_over_batch
def aft_full(d: Document, position_bias: Array, *, gate: str = "sigmoid", eps: float = 0) -> Array:
    """AFT-full: Zhai et al., An Attention Free Transformer, arXiv 2105.14103, eq. 2.

    Y_t = gate(Q_t) * sum_u exp(K_u + w_tu) V_u / sum_u exp(K_u + w_tu)
    """
    return _attention_free(d, position_bias[None, d.rows, : len(d.key)], gate, eps)


@_over_batch
def aft_local(d: Document, band: Array, *, gate: str = "sigmoid", eps: float = 0) -> Array:
    """AFT-local: arXiv 2105.14103, eq. 4.

    w_tu = w[t, u] if |t - u| < s, else 0, in eq. 2

    A key outside the window counts with exp(K). ``band [1 or T, 2 s - 1]``, or ``[1 or T, s]`` in
    causal form, holds the biases of keys t - (s - 1) and on.
    """
    s = band.shape[1] if d.causal else (band.shape[1] + 1) // 2
    return _attention_free(d, _window(d, band, s - 1)[None], gate, eps)


@_over_batch
def aft_simple(d: Document, *, gate: str = "sigmoid", num_heads: int = 0, eps: float = 0) -> Array:
    """AFT-simple: arXiv 2105.14103, eq. 5.

    Y_t = gate(Q_t) * sum_u exp(K_u) V_u / sum_u exp(K_u)

    With ``num_heads`` the key has a column for each head (MobileViTv2, arXiv 2206.02680, has one).
    """
    assert d.key.shape[1] == (num_heads or d.value.shape[1])
    return _attention_free(d, np.zeros((1, len(d.rows), len(d.key))), gate, eps)


@_over_batch
def aft_conv(
    d: Document, filter: Array, *, num_heads: int, gate: str = "sigmoid", eps: float = 0
) -> Array:
    """AFT-conv: arXiv 2105.14103, eq. 6.

    num = conv1d(exp(K) V, exp(w) - 1) + sum_u exp(K_u) V_u
    den = conv1d(exp(K), exp(w) - 1) + sum_u exp(K_u),  Y = gate(Q) * num / den

    A tap takes exp(K) from the sum and adds exp(w + K): the same as the bias w in a window, else 0.
    K is ``[T, heads]``, ``filter [heads, s]``. The padding is "same", or left in causal form.
    """
    taps = filter.shape[1]
    left = taps - 1 if d.causal else (taps - 1) // 2
    return _attention_free(d, np.stack([_window(d, w[None], left) for w in filter]), gate, eps)


@_over_batch
def efficient_attention(
    d: Document,
    *,
    num_heads: int,
    normalization: str = "softmax",
    scale: float = 1.0,
    kv_num_heads: int = 0,
) -> Array:
    """Efficient Attention: Shen et al., arXiv 1812.01243.

    Y = scale * rho_q(Q) (rho_k(K)^T V)      per head

    softmax: rho_q over the channels of each query, rho_k over the keys of each key channel.
    scaling: both divide by sqrt(n), n the number of keys. ``scale`` and causal form, in which the
    keys are those up to the row, are not of the paper.
    """
    visible = d.visible(d.rows)
    no_bias = np.zeros(visible.shape)
    heads = []
    for query, key, value in _heads(num_heads, kv_num_heads, d):
        if normalization == "scaling":
            scores = np.where(visible, query @ key.T, 0)
            heads.append(scores / visible.sum(1, keepdims=True) @ value)
            continue
        contexts = [softmax_of_sum(channel, no_bias, visible) @ value for channel in key.T]
        heads.append(np.einsum("tc,ctv->tv", softmax(query, 1), np.stack(contexts)))
    return scale * np.concatenate(heads, axis=1)


@_over_batch
def fastformer(d: Document, alpha_weight: Array, beta_weight: Array, *, num_heads: int) -> Array:
    """Fastformer: Wu et al., arXiv 2108.09084, as in the authors' code.

    alpha = softmax_T(Q Wa / sqrt(d)),  g_q[h] = sum_t alpha[t, h] Q[t, h],  P = K * g_q
    beta  = softmax_T(P Wb / sqrt(d)),  g_k[h] = sum_t beta[t, h] P[t, h],   Y = V * g_k

    A head's logits read all channels, and the second mean is of P. In causal form, which is not of
    the paper, both means are of the tokens up to the row.
    """
    product = d.key * _pool(d, d.query, alpha_weight, np.arange(len(d.query)))
    return d.value[d.rows] * _pool(d, product, beta_weight, d.rows)


def _pool(d: Document, x: Array, weight: Array, rows: Array) -> Array:
    """Return for each row the means of ``x [N, C]``, weighted by a softmax for each head."""
    visible, (channels, heads) = d.visible(rows), weight.shape
    logits = x @ weight / np.sqrt(channels // heads)
    no_bias = np.zeros(visible.shape)
    parts = np.split(x, heads, axis=1)
    means = [
        softmax_of_sum(z, no_bias, visible) @ part for z, part in zip(logits.T, parts, strict=True)
    ]
    return np.concatenate(means, axis=1)


@_over_batch
def linear_attention(
    d: Document,
    *,
    num_heads: int,
    feature_map: str = "elu",
    eps: float = 1e-6,
    normalizer: str = "add",
    kv_num_heads: int = 0,
) -> Array:
    """Linear attention: Katharopoulos et al., Transformers are RNNs, arXiv 2006.16236, eq. 5.

    Y_t = sum_u (phi(Q_t) phi(K_u)^T) V_u / (sum_u phi(Q_t) phi(K_u)^T + eps)      per head

    phi(x) is elu(x) + 1 (eq. 7), relu(x), or x where the features come from outside. eps, its use
    as a minimum of the divisor (clamp) and the form without a divisor (none) are not of the paper.
    """
    phi = {
        "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        "relu": lambda x: np.maximum(x, 0),
        "identity": lambda x: x,
    }[feature_map]
    divisor = {
        "add": lambda z: z + max(eps, MIN_EPS),
        "clamp": lambda z: np.maximum(z, max(eps, MIN_EPS)),
        "none": np.ones_like,
    }[normalizer]
    visible = d.visible(d.rows)
    heads = []
    for query, key, value in _heads(num_heads, kv_num_heads, d):
        scores = np.where(visible, phi(query) @ phi(key).T, 0)
        heads.append(scores @ value / divisor(scores.sum(1, keepdims=True)))
    return np.concatenate(heads, axis=1)


def _heads(num_heads: int, groups: int, d: Document) -> list[tuple[Array, Array, Array]]:
    """Return query, key and value of each head; of ``groups`` heads of key and value if not 0."""
    groups = groups or num_heads
    queries = np.split(d.query[d.rows], num_heads, axis=1)
    keys, values = (np.split(x, groups, axis=1) for x in (d.key, d.value))
    shared = [i // (num_heads // groups) for i in range(num_heads)]
    return [(query, keys[i], values[i]) for query, i in zip(queries, shared, strict=True)]


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    """Ba et al., Layer Normalization, arXiv 1607.06450, eq. 4, with epsilon beside the variance.

    Y = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias      over the channels
    """
    deviation = x - x.mean(-1, keepdims=True)
    return deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + epsilon) * weight + bias


MECHANISMS: dict[str, Callable[..., Array]] = {
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
