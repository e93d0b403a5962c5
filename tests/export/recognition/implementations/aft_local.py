"""AFT-local as other people write it."""

import torch
from torch import Tensor, nn

from ..layer import Layer, bias, matrix
from .aft_full import full_einsum_separate_maxima, full_matmul, full_softmax_broadcast


def _band(w: Tensor) -> Tensor:
    positions = torch.arange(w.shape[0])
    return (positions[:, None] - positions).abs() < 4


def local_product(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return full_matmul(q, k, v, w * _band(w))


def local_where(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return full_softmax_broadcast(q, k, v, torch.where(_band(w), w, 0.0))


def local_where_by_length(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    tokens = q.shape[1]
    near = torch.where(bias(_band(w), tokens), bias(w, tokens), 0)
    return full_matmul(q, k, v, near)


def local_band_by_length(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    w = bias(w, q.shape[1])
    return full_matmul(q, k, v, w * _band(w))


def local_exponentials(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    w = bias(w, q.shape[1])
    e = torch.where(_band(w), w.exp(), 1.0)
    return torch.sigmoid(q) * ((e @ (k.exp() * v)) / (e @ k.exp()))


def local_factorized(q: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> Tensor:
    left, right = (factor[: q.shape[1]] for factor in factors)
    w = left @ right.t()
    return full_softmax_broadcast(q, k, v, torch.where(_band(w), w, 0.0))


def local_row_maximum(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return full_einsum_separate_maxima(q, k, v, w * _band(w))


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    w = 0.5 * matrix(1)
    local = [
        local_product, local_where, local_row_maximum, local_where_by_length,
        local_band_by_length, local_exponentials,
    ]  # fmt: skip
    found: dict[str, tuple[str, nn.Module]] = {f.__name__: ("AftLocal", Layer(f, w)) for f in local}
    found["local_factorized"] = (
        "AftLocal",
        Layer(local_factorized, 0.3 * matrix(2, 4), 0.3 * matrix(3, 4)),
    )
    return found
