"""Efficient Attention as other people write it."""

import torch
from torch import Tensor, nn

from ..layer import DIM, HEADS, Layer, heads, merged


def efficient_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    context = torch.einsum("bhnd,bhne->bhde", k.softmax(-2), v)
    return merged(torch.einsum("bhnd,bhde->bhne", q.softmax(-1), context))


def efficient_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v))


def efficient_quadratic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged((q.softmax(-1) @ k.softmax(-2).transpose(-1, -2)) @ v)


def efficient_one_head_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.softmax(-1) * DIM**-0.5
    return q @ (k.transpose(1, 2).softmax(-1) @ v)


def efficient_scaled_by_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The older exporter has the root computed in the graph, in float32."""
    q, k, v = map(heads, (q, k, v))
    scale = q.shape[-1] ** -0.25
    return merged((q * scale).softmax(-1) @ ((k * scale).softmax(-2).transpose(-1, -2) @ v))


def efficient_exp_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    ek = (k - k.amax(2, keepdim=True)).exp()
    eq = q.exp()
    context = (ek.transpose(2, 3) @ v) / ek.sum(2)[..., None]
    return merged((eq @ context) / eq.sum(-1, keepdim=True))


def efficient_batch_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, tokens = q.shape[:2]
    q, k, v = (heads(x).reshape(batch * HEADS, tokens, -1) for x in (q, k, v))
    mixed = torch.bmm(q.softmax(2), torch.bmm(k.softmax(1).transpose(1, 2), v))
    return merged(mixed.view(batch, HEADS, tokens, -1))


def efficient_weights_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights are 0, and not NaN, where no token counts."""
    left_out = (v[..., :1] < -1.0)[:, None]
    q, k, v = map(heads, (q, k, v))
    weight = k.masked_fill(left_out, -torch.inf).softmax(-2).masked_fill(left_out, 0.0)
    return merged(q.softmax(-1) @ (weight.transpose(-1, -2) @ v))


def efficient_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left_out = (v[..., :1] < -1.0)[:, None]
    q, k, v = map(heads, (q, k, v))
    k, v = k.masked_fill(left_out, -1e9), v.masked_fill(left_out, 0.0)
    return merged(q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v))


def efficient_mask_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left_out = (v[..., :1] < -1.0)[:, None]
    q, k, v = map(heads, (q, k, v))
    e = k.exp().masked_fill(left_out, 0.0)
    return merged(q.softmax(-1) @ ((e / e.sum(2, keepdim=True)).transpose(-1, -2) @ v))


def efficient_values_left_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Left out after the keys' softmax, which is over all tokens: as if it had no value."""
    left_out = (v[..., :1] < -1.0)[:, None]
    q, k, v = map(heads, (q, k, v))
    return merged(q.softmax(-1) @ (k.softmax(-2).masked_fill(left_out, 0.0).transpose(-1, -2) @ v))


class EfficientImages(nn.Module):
    """The authors' code: convolutions of images, and a loop over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Conv2d(DIM, DIM, 1) for _ in range(3))
        self.output = nn.Conv2d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        queries, keys, values = (
            layer(x).reshape(batch, DIM, height * width)
            for layer in (self.query, self.key, self.value)
        )
        attended = []
        for first in range(0, DIM, DIM // HEADS):
            head = slice(first, first + DIM // HEADS)
            context = keys[:, head].softmax(2) @ values[:, head].transpose(1, 2)
            mixed = context.transpose(1, 2) @ queries[:, head].softmax(1)
            attended.append(mixed.reshape(batch, DIM // HEADS, height, width))
        return self.output(torch.cat(attended, 1)) + x


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    efficient = [
        efficient_einsum, efficient_matmul, efficient_quadratic, efficient_one_head_scaled,
        efficient_exp_sum, efficient_scaled_by_width, efficient_batch_of_heads, efficient_masked,
        efficient_mask_filled, efficient_values_left_out, efficient_weights_filled,
    ]  # fmt: skip
    return {f.__name__: ("EfficientAttention", Layer(f)) for f in efficient}
