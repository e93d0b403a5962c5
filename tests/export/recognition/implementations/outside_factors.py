"""Layers that multiply a result by scales or masks of rows, and layers with no-op operators."""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, dropout, pad

from ..layer import DIM, HEADS, Layer, bias, elu_features, heads, matrix, merged
from .aft_conv import per_channel

_OF_HEADS = torch.linspace(0.5, 2.0, HEADS)
_OF_CHANNELS = torch.linspace(-1.0, 2.0, DIM)


def _head_by_head(v: Tensor) -> Tensor:
    """``[B, T, D]``, each head times a number of its own."""
    return (v.view(v.shape[0], v.shape[1], HEADS, -1) * _OF_HEADS[:, None]).flatten(2)


def _rows(q: Tensor) -> Tensor:
    """The rows that count, ``[B, T, 1]``."""
    return q[..., :1] > -1.0


def simple_values_of_heads_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * (k.softmax(1) * _head_by_head(v)).sum(1, keepdim=True)


def simple_causal_values_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.sigmoid() * (e * (v * -0.5)).cumsum(1) / e.cumsum(1)


def full_values_of_channels_scaled(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = torch.exp(bias(w, q.shape[1]))
    return q.sigmoid() * ((e @ (k.exp() * (v * _OF_CHANNELS))) / (e @ k.exp()))


def conv_values_of_heads_scaled(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Causal; rows of queries are masked above the sum of the weights."""
    e = per_channel(k).transpose(1, 2).exp()
    taps = per_channel((w.exp() - 1).t()).t().unsqueeze(1)

    def weighed(x: Tensor) -> Tensor:
        return conv1d(pad(x, (w.shape[1] - 1, 0)), taps, groups=DIM) + x.cumsum(-1)

    above = weighed(e * _head_by_head(v).transpose(1, 2)) * _rows(q).transpose(1, 2)
    return q.sigmoid() * (above / weighed(e)).transpose(1, 2)


def efficient_values_of_heads_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    counts = _rows(q)[:, None].float()
    q, k, v = map(heads, (q, k, _head_by_head(v)))
    return merged((q.softmax(-1) * counts) @ (k.softmax(-2).transpose(-1, -2) @ v))


def linear_values_of_heads_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, _head_by_head(v)))
    q, k = elu_features(q), elu_features(k)
    den = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.transpose(2, 3) @ v) / (den + 1e-6))


def linear_values_and_features_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, 3.0 * v))
    q, k = 0.5 * elu_features(q), elu_features(k)
    context = (k[..., None] * v[..., None, :]).cumsum(2)
    den = (q * k.cumsum(2)).sum(-1, keepdim=True)
    return merged((q[..., None, :] @ context).squeeze(-2) / (den + 1e-6))


def simple_rows_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    counts = _rows(q) & (q[..., 1:2] > -1.5)
    mean = (k.softmax(1) * v).sum(1, keepdim=True).expand_as(v)
    return q.sigmoid() * mean.masked_fill(~counts, 0.0)


def simple_causal_gate_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return (q.sigmoid() * _rows(q)) * ((e * v).cumsum(1) / e.cumsum(1))


def linear_rows_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries and keys by one mask, and an eps that is added to what is masked."""
    counts = _rows(q)[:, None].float()
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q) * counts, elu_features(k) * counts
    den = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.transpose(2, 3) @ v) / (den + 1e-6))


def linear_causal_pairs_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    counts = _rows(q)
    both = (counts & counts.transpose(1, 2))[:, None]
    q, k, v = map(heads, (q, k, v))
    scores = torch.tril(elu_features(q) @ elu_features(k).transpose(2, 3)).masked_fill(~both, 0.0)
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    plain = {
        "AftSimple": [simple_values_of_heads_scaled, simple_rows_masked],
        "CausalAftSimple": [simple_causal_values_scaled, simple_causal_gate_masked],
        "EfficientAttention": [efficient_values_of_heads_scaled],
        "NormalizedLinearAttention": [linear_values_of_heads_scaled, linear_rows_masked],
        "CausalNormalizedLinearAttention": [
            linear_values_and_features_scaled, linear_causal_pairs_masked,
        ],
    }  # fmt: skip
    found: dict[str, tuple[str, nn.Module]] = {
        f.__name__: (operator, Layer(f)) for operator, few in plain.items() for f in few
    }
    full, conv = full_values_of_channels_scaled, conv_values_of_heads_scaled
    found[full.__name__] = "AftFull", Layer(full, 0.5 * matrix(1))
    filters = 0.5 * matrix(4, 5)[:HEADS]
    found[conv.__name__] = "CausalAftConv", Layer(conv, filters, keys=HEADS)
    return found | _no_op_layers()


def _same(x: Tensor) -> Tensor:
    """Return x after a slice, a pad, a concatenation and a cast without effect."""
    x = pad(x[:, : x.shape[1]], (0, 0, 0, 0))
    return dropout(torch.cat([x], 1).double().float(), 0.5, training=False)


def simple_with_no_ops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weight = _same(_same(k).softmax(1))
    return _same(q.sigmoid()) * _same((weight * _same(v)).sum(1, keepdim=True))


def efficient_with_no_ops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, map(_same, (q, k, v)))
    return merged(_same(q.softmax(-1)) @ _same(_same(k.softmax(-2)).transpose(-1, -2) @ v))


def linear_causal_with_no_ops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = _same(elu_features(q)), _same(elu_features(k))
    context = _same((k[..., None] * v[..., None, :]).cumsum(2))
    den = _same((q * k.cumsum(2)).sum(-1, keepdim=True))
    return merged((q[..., None, :] @ context).squeeze(-2) / (den + 1e-6))


def _no_op_layers() -> dict[str, tuple[str, nn.Module]]:
    return {
        "simple_with_no_ops": ("AftSimple", Layer(simple_with_no_ops)),
        "efficient_with_no_ops": ("EfficientAttention", Layer(efficient_with_no_ops)),
        "linear_causal_with_no_ops": (
            "CausalNormalizedLinearAttention",
            Layer(linear_causal_with_no_ops),
        ),
    }
