"""Linear attention as other people write it, also to other tokens than those of the queries."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..layer import DIM, HEADS, TOKENS, Layer, elu_features, heads, merged


def linear_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.view(x.shape[0], x.shape[1], HEADS, -1) for x in (q, k, v))
    q, k = elu_features(q), elu_features(k)
    context = torch.einsum("nshd,nshm->nhmd", k, v)
    z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
    return torch.einsum("nlhd,nhmd,nlh->nlhm", q, context, z).reshape(*q.shape[:2], -1)


def linear_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    den = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.transpose(2, 3) @ v) / den)


def linear_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def features(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.exp())

    q, k, v = map(heads, (q, k, v))
    scores = features(q) @ features(k).transpose(2, 3)
    return merged((scores / scores.sum(-1, keepdim=True)) @ v)


def linear_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    total = torch.einsum("bhnd,bhd->bhn", q, k.sum(dim=-2))
    context = torch.einsum("bhnd,bhne->bhde", k, v)
    return merged(torch.einsum("bhnd,bhde->bhne", q, context) / (total[..., None] + 1e-3))


def linear_padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    out = q @ (k.transpose(2, 3) @ nn.functional.pad(v, (0, 1), value=1.0))
    return merged(out[..., :-1] / (out[..., -1:] + 1e-5))


def linear_padded_tokens_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (heads(x).transpose(2, 3) for x in (q, k, v))
    vk = nn.functional.pad(v, (0, 0, 0, 1), value=1.0) @ k.relu().transpose(2, 3)
    out = vk @ q.relu()
    return merged((out[:, :, :-1] / (out[:, :, -1:] + 1e-6)).transpose(2, 3))


def linear_ones_beside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    beside = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    out = elu_features(q) @ (elu_features(k).transpose(2, 3) @ beside)
    return merged(out[..., :-1] / (out[..., -1:] + 1e-6))


def linear_mask_multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = (v[..., :1] > -1.0).float()[:, None]
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k) * mask
    den = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-6
    return merged(q @ (k.transpose(2, 3) @ v) / den)


def linear_mask_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left_out = ~(v[..., :1] > -1.0)[:, None]
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k).masked_fill(left_out, 0.0)
    den = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-6
    return merged(q @ (k.transpose(2, 3) @ v.masked_fill(left_out, 0.0)) / den)


def linear_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    context = (k[..., None] * v[..., None, :]).cumsum(2)
    den = (q * k.cumsum(2)).sum(-1, keepdim=True)
    return merged((q[..., None, :] @ context).squeeze(-2) / (den + 1e-6))


def linear_causal_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    lower = torch.ones(TOKENS, TOKENS).tril()[: q.shape[2], : q.shape[2]]
    scores = (elu_features(q) @ elu_features(k).transpose(2, 3)) * lower
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_causal_tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    scores = torch.tril(elu_features(q) @ elu_features(k).transpose(2, 3))
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_causal_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    lower = torch.ones(q.shape[2], q.shape[2]).tril()
    scores = (elu_features(q) @ elu_features(k).transpose(2, 3)) * lower
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_causal_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    after = torch.triu(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool), 1)
    scores = (elu_features(q) @ elu_features(k).transpose(2, 3)).masked_fill(after, 0.0)
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_causal_filled_by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    lower = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[: q.shape[2], : q.shape[2]]
    scores = (elu_features(q) @ elu_features(k).transpose(2, 3)).masked_fill(~lower, 0.0)
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_causal_mask_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    counts = (v[..., 0] > -1.0)[:, None, None]
    q, k, v = map(heads, (q, k, v))
    counts = counts & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = (elu_features(q) @ elu_features(k).transpose(2, 3)).masked_fill(~counts, 0.0)
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_causal_compared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[1])
    q, k, v = map(heads, (q, k, v))
    scores = elu_features(q) @ elu_features(k).transpose(2, 3)
    scores = scores.masked_fill(place > place[:, None], 0.0)
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_causal_compared_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.ones(q.shape[1]).cumsum(0)
    q, k, v = map(heads, (q, k, v))
    scores = elu_features(k) @ elu_features(q).transpose(2, 3)
    scores = scores * (place[:, None] <= place).float()
    mean = v.transpose(2, 3) @ scores / (scores.sum(-2, keepdim=True) + 1e-6)
    return merged(mean.transpose(2, 3))


def linear_ellipses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    context = torch.einsum("...nd,...ne->...de", k, v)
    total = torch.einsum("...nd,...d->...n", q, k.sum(-2))
    return merged(torch.einsum("...nd,...de->...ne", q, context) / total[..., None])


class LiteImages(nn.Module):
    """Linear attention of images at two scales, the positions last or the channels."""

    def __init__(self, *, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.qkv = nn.Conv2d(DIM, 3 * DIM, 1, bias=False)
        self.scale = nn.Sequential(
            nn.Conv2d(3 * DIM, 3 * DIM, 3, padding=1, groups=3 * DIM),
            nn.Conv2d(3 * DIM, 3 * DIM, 1, groups=3 * HEADS),
        )
        self.output = nn.Conv2d(2 * DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        qkv = self.qkv(x)
        qkv = torch.cat((qkv, self.scale(qkv)), 1)
        qkv = qkv.reshape(batch, -1, 3 * DIM // HEADS, height * width)
        if self.channels_last:
            q, k, v = qkv.transpose(-1, -2).chunk(3, dim=-1)
            v = nn.functional.pad(v, (0, 1), value=1.0)
            out = q.relu() @ (k.relu().transpose(-1, -2) @ v)
            out = (out[..., :-1] / (out[..., -1:] + 1e-5)).transpose(-1, -2)
        else:
            d = DIM // HEADS
            q, k, v = qkv[:, :, :d], qkv[:, :, d : 2 * d], qkv[:, :, 2 * d :]
            v = nn.functional.pad(v, (0, 0, 0, 1), value=1.0)
            out = v @ k.relu().transpose(-1, -2) @ q.relu()
            out = out[:, :, :-1] / (out[:, :, -1:] + 1e-15)
        return x + self.output(out.reshape(batch, -1, height, width))


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    linear = [
        linear_einsum, linear_matmul, linear_where, linear_relu, linear_mask_multiplied,
        linear_mask_filled, linear_ellipses, linear_padded, linear_padded_tokens_last,
        linear_ones_beside,
    ]  # fmt: skip
    causal = [
        linear_causal, linear_causal_scores, linear_causal_tril, linear_causal_ones,
        linear_causal_filled, linear_causal_filled_by_length, linear_causal_mask_filled,
        linear_causal_compared, linear_causal_compared_keys_first,
    ]  # fmt: skip
    found: dict[str, tuple[str, nn.Module]] = {
        f.__name__: ("NormalizedLinearAttention", Layer(f)) for f in linear
    }
    found |= {f.__name__: ("CausalNormalizedLinearAttention", Layer(f)) for f in causal}
    return found | _cross_layers()


Cross = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of query, key, value, and whether each query and each key counts."""


class CrossLayer(nn.Module):
    """Queries of the tokens, and keys and values of the tokens and five more."""

    def __init__(self, attend: Cross, width: int | None = None) -> None:
        super().__init__()
        self.attend = attend
        self.query, self.key, self.value = (
            nn.Linear(DIM, n) for n in (width or DIM, width or DIM, DIM)
        )
        self.output = nn.Linear(DIM, DIM)
        self.memory = nn.Parameter(torch.randn(1, 5, DIM))

    def forward(self, x: Tensor) -> Tensor:
        source = torch.cat((x, self.memory.expand(x.shape[0], -1, -1)), 1)
        counts = (x[..., 0] > -1.5, source[..., 0] > -1.0)
        mixed = self.attend(self.query(x), self.key(source), self.value(source), *counts)
        return x + self.output(mixed)


def matching_einsum(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Values divided by their number, which multiplies the result again."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
    q, k = elu_features(q) * rows[:, :, None, None], elu_features(k) * counts[:, :, None, None]
    v = v * counts[:, :, None, None]
    length = v.size(1)
    context = torch.einsum("nshd,nshv->nhdv", k, v / length)
    z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
    return (torch.einsum("nlhd,nhdv,nlh->nlhv", q, context, z) * length).flatten(2)


def matching_matmul(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k) * counts[:, None, :, None]
    below = q @ k.sum(2, keepdim=True).transpose(2, 3) + 1e-6
    return merged(q @ (k.transpose(2, 3) @ v) / below)


def relu_without_masks(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    below = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-3
    return merged(q @ (k.transpose(2, 3) @ v) / below)


def efficient_einsum(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    context = torch.einsum("bhnd,bhne->bhde", k.softmax(-2), v)
    return merged(torch.einsum("bhnd,bhde->bhne", q.softmax(-1), context))


def efficient_matmul(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k.masked_fill(~counts[..., None], -1e9), v))
    return merged(q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v))


def _cross_layers() -> dict[str, tuple[str, nn.Module]]:
    linear = [matching_einsum, matching_matmul, relu_without_masks]
    found: dict[str, tuple[str, nn.Module]] = {
        f"cross_{f.__name__}": ("NormalizedLinearAttention", CrossLayer(f)) for f in linear
    }
    for f in (efficient_einsum, efficient_matmul):
        found[f"cross_{f.__name__}"] = "EfficientAttention", CrossLayer(f)
        found[f"cross_narrow_{f.__name__}"] = "EfficientAttention", CrossLayer(f, DIM // 2)
    found["cross_narrow_matching_matmul"] = (
        "NormalizedLinearAttention",
        CrossLayer(matching_matmul, DIM // 2),
    )
    return found
