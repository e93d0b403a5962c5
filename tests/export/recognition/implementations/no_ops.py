"""No-op operators in all places where they might cut a mechanism in two."""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad

from ..layer import Layer, elu_features, heads, merged


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


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    return {
        "simple_with_no_ops": ("AftSimple", Layer(simple_with_no_ops)),
        "efficient_with_no_ops": ("EfficientAttention", Layer(efficient_with_no_ops)),
        "linear_causal_with_no_ops": (
            "CausalNormalizedLinearAttention",
            Layer(linear_causal_with_no_ops),
        ),
    }
