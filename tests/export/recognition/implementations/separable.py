"""Separable attention of MobileViTv2, one key for all channels and a gate of relu; and an eps."""

import torch
from torch import Tensor, nn

from ..layer import HEADS, TOKENS, Layer, bias, heads, matrix, merged


def separable_of_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = (v * k.softmax(1)).sum(1, keepdim=True)
    return q.relu() * context.expand_as(q)


def separable_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k.transpose(1, 2).softmax(-1) @ v) * q.relu()


def separable_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = k.transpose(1, 2).softmax(-1)
    return merged(heads(q.relu()) * (weights.unsqueeze(2) @ heads(v)))


def simple_with_eps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / (e.sum(1, keepdim=True) + 1e-3)


def full_with_eps(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = bias(w, q.shape[1]).exp()
    return q.sigmoid() * (e @ (k.exp() * v)) / (e @ k.exp() + 1e-6)


def full_one_key_and_eps(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = bias(w, q.shape[1]).exp()
    return q.sigmoid() * (e @ (k.exp() * v)) / (e @ k.exp() + 1e-3)


def local_with_eps(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    place = torch.arange(TOKENS)
    near = (place[:, None] - place).abs() < 4
    e = bias(w * near, q.shape[1]).exp()
    return q.sigmoid() * (e @ (k.exp() * v)) / (e @ k.exp() + 1e-2)


class SeparableImages(nn.Module):
    """One convolution makes query, key and value; attention is over the patches of an image.

    Patches are ``[B, C, P, N]``: N patches of P pixels, and attention for each pixel. Another axis
    than the last is another function.
    """

    def __init__(self, channels: int = 8, *, axis: int = -1) -> None:
        super().__init__()
        self.channels, self.axis = channels, axis
        self.qkv = nn.Conv2d(channels, 1 + 2 * channels, 1)
        self.output = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).split([1, self.channels, self.channels], dim=1)
        weight = (query if self.axis == -1 else key).softmax(dim=self.axis)
        context = (key * weight).sum(dim=self.axis, keepdim=True)
        return self.output(value.relu() * context.expand_as(value))


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    found: dict[str, tuple[str, nn.Module]] = {
        f.__name__: ("AftSimple", Layer(f, keys=1))
        for f in (separable_of_sequence, separable_matmul)
    }
    found["separable_of_heads"] = "AftSimple", Layer(separable_of_heads, keys=HEADS)
    w = 0.5 * matrix(1)
    found["full_with_eps"] = "AftFull", Layer(full_with_eps, w)
    found["full_one_key_and_eps"] = "AftFull", Layer(full_one_key_and_eps, w, keys=1)
    found["local_with_eps"] = "AftLocal", Layer(local_with_eps, w)
    found["simple_with_eps"] = "AftSimple", Layer(simple_with_eps)
    return found
