"""The mechanisms as other people write them: every style is the same function as its operator."""

import math

import torch
from torch import Tensor, nn

from . import implementations_aft_conv
from .layer import DIM, HEADS, TOKENS, Layer, bias, heads, merged

# AFT-full


def full_matmul(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = torch.exp(bias(w, q.shape[1]))
    return torch.sigmoid(q) * ((e @ (torch.exp(k) * v)) / (e @ torch.exp(k)))


def full_einsum_separate_maxima(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    w = bias(w, q.shape[1])
    ek = (k - k.amax(1, keepdim=True)).exp()
    ew = (w - w.amax(1, keepdim=True)).exp()
    num = torch.einsum("tu,buc->btc", ew, ek * v)
    return torch.sigmoid(q) * num / torch.einsum("tu,buc->btc", ew, ek)


def full_softmax_broadcast(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    logits = k[:, None] + bias(w, q.shape[1])[None, :, :, None]
    return (logits.softmax(2) * v[:, None]).sum(2) * q.sigmoid()


def full_exp_sum_joint_maximum(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    logits = k.unsqueeze(1) + bias(w, q.shape[1]).unsqueeze(-1)
    weight = torch.exp(logits - logits.max(dim=2, keepdim=True).values)
    return torch.sigmoid(q) * (weight * v.unsqueeze(1)).sum(2) / weight.sum(2)


def full_channels_first(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = torch.exp(bias(w, q.shape[1])).t()
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    mean = torch.matmul(k.exp() * v, e) * torch.reciprocal(torch.matmul(k.exp(), e))
    return mean.transpose(1, 2) / (1 + torch.exp(-q))


def full_factorised(q: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return full_matmul(q, k, v, left @ right.t())


def full_factorised_by_length(q: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> Tensor:
    left, right = (factor[: q.shape[1]] for factor in factors)
    return full_matmul(q, k, v, left @ right.t())


def full_relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A bias of any length: from 20 tokens on, the distance makes no difference."""
    place = torch.arange(q.shape[1])
    return full_matmul(q, k, v, table[(place - place[:, None]).clamp(-20, 20) + 20])


def full_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias of no weights at all."""
    place = torch.arange(q.shape[1])
    return full_matmul(q, k, v, -0.1 * (place - place[:, None]).abs())


def full_factorised_einsum(q: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> Tensor:
    left, right = (factor[: q.shape[1]] for factor in factors)
    return full_einsum_separate_maxima(q, k, v, torch.einsum("tr,ur->tu", left, right))


def full_tokens_first(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    e = torch.exp(bias(w, q.shape[0]))
    num = torch.einsum("ij,jbd->ibd", e, k.exp() * v)
    den = torch.einsum("ij,jbd->ibd", e, k.exp())
    return (q.sigmoid() * num / den).transpose(0, 1)


def full_tanh(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = torch.exp(bias(w, q.shape[1]))
    return (e @ (k.exp() * v)) / (e @ k.exp()) * q.tanh()


def full_causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    after = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    masked = bias(w.masked_fill(after, -math.inf), q.shape[1])
    return full_softmax_broadcast(q, k, v, masked)


def full_causal_by_product(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = bias(w.exp().tril(), q.shape[1])
    return torch.sigmoid(q) * ((e @ (k.exp() * v)) / (e @ k.exp()))


def full_keys_left_out(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    left_out = v[..., 0] < -1.0
    logits = k[:, None] + bias(w, q.shape[1])[None, :, :, None]
    weight = logits.masked_fill(left_out[:, None, :, None], -math.inf).softmax(2)
    return (weight * v[:, None]).sum(2) * q.sigmoid()


def full_causal_keys_left_out(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    tokens = q.shape[1]
    counts = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[:tokens, :tokens]
    counts = counts & (v[..., 0] > -3.0)[:, None]
    logits = k[:, None] + bias(w, tokens)[None, :, :, None]
    logits = logits.masked_fill(~counts[..., None], -math.inf)
    e = torch.exp(logits - logits.amax(2, keepdim=True))
    return (e * v[:, None]).sum(2) / e.sum(2) * q.sigmoid()


# AFT-local


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


def local_factorised(q: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> Tensor:
    left, right = (factor[: q.shape[1]] for factor in factors)
    w = left @ right.t()
    return full_softmax_broadcast(q, k, v, torch.where(_band(w), w, 0.0))


def local_row_maximum(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return full_einsum_separate_maxima(q, k, v, w * _band(w))


# AFT-simple


def simple_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q) * (torch.softmax(k, 1) * v).sum(dim=1, keepdim=True)


def simple_exp_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return torch.sigmoid(q) * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def simple_shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(k - k.max(dim=1, keepdim=True)[0])
    return (e * v).sum(1)[:, None] * e.sum(1)[:, None].reciprocal() * torch.sigmoid(q)


def simple_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = torch.einsum("btd,btd->bd", k.softmax(1), v)
    return torch.einsum("btd,bd->btd", q.sigmoid(), context)


def simple_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.sigmoid() * (k.softmax(-2) * v).sum(-2, keepdim=True).expand_as(v))


def simple_log_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weight = torch.exp(k - torch.logsumexp(k, 1, keepdim=True))
    return (weight * v).sum(1, keepdim=True) * q.sigmoid()


def simple_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return torch.sigmoid(q) * (e * v).cumsum(1) / e.cumsum(1)


def simple_keys_left_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k.masked_fill(v[..., :1] < -1.0, -math.inf)
    return q.sigmoid() * (k.softmax(1) * v).sum(1, keepdim=True)


def simple_mask_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = (v[..., :1] > -1.0).float()
    return q.sigmoid() * ((k + (1 - mask) * -1e4).softmax(1) * v).sum(1, keepdim=True)


def simple_mask_multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp() * (v[..., :1] > -1.0).float()
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def simple_mask_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp().masked_fill(~(v[..., :1] > -1.0), 0.0)
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def simple_masks_of_two_kinds(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Whether a token counts is told by two conditions, and left out of keys and of values."""
    counts = ~((v[..., :1] < -1.5) | (v[..., 1:2] < -1.5))
    weight = k.masked_fill(~counts, -math.inf).softmax(1)
    return q.sigmoid() * (weight * (v * counts)).sum(1, keepdim=True)


# Efficient Attention


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
    """As its authors have it: convolutions of images, and a loop over heads."""

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


# Linear attention


def elu_features(x: Tensor) -> Tensor:
    return nn.functional.elu(x) + 1


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


def linear_ellipses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    context = torch.einsum("...nd,...ne->...de", k, v)
    total = torch.einsum("...nd,...d->...n", q, k.sum(-2))
    return merged(torch.einsum("...nd,...de->...ne", q, context) / total[..., None])


# Fastformer


class Fastformer(nn.Module):
    """As its authors have it: heads apart, and a mask that is added to the logits."""

    def __init__(self, pool: str = "matmul", masked: bool = False) -> None:
        super().__init__()
        self.pool, self.masked = pool, masked
        self.query, self.key = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.query_att, self.key_att = nn.Linear(DIM, HEADS), nn.Linear(DIM, HEADS)
        self.transform = nn.Linear(DIM, DIM)

    def pooled(self, x: Tensor, att: nn.Linear, mask: Tensor) -> Tensor:
        """``[B, 1, D]``."""
        logits = att(x).transpose(1, 2) / math.sqrt(DIM // HEADS)
        if self.masked:
            logits = logits + mask
        if self.pool == "einsum":
            weight = torch.softmax(logits, -1)
            return torch.einsum("bht,bhtd->bhd", weight, heads(x)).reshape(x.shape[0], 1, DIM)
        if self.pool == "exp-sum":
            weight = torch.exp(logits - logits.amax(-1, keepdim=True))
            sums = (weight[..., None] * heads(x)).sum(2) / weight.sum(-1, keepdim=True)
            return sums.reshape(x.shape[0], 1, DIM)
        weight = torch.softmax(logits, -1).unsqueeze(2)
        return (weight @ heads(x)).transpose(1, 2).reshape(-1, 1, DIM)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = (1.0 - (x[..., 0] if mask is None else mask))[:, None] * -10000.0
        q, k = self.query(x), self.key(x)
        p = k * self.pooled(q, self.query_att, mask).repeat(1, x.shape[1], 1)
        return self.transform(self.pooled(p, self.key_att, mask) * q) + q


class MaskedFastformer(Fastformer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, (x[..., 0] > -1.0).float())


def _matrix(seed: int, columns: int = TOKENS) -> Tensor:
    return torch.randn(TOKENS, columns, generator=torch.Generator().manual_seed(seed))


def layers() -> dict[str, tuple[str, nn.Module]]:
    """By name: the operator that is expected, and a layer."""
    torch.manual_seed(0)
    w = 0.5 * _matrix(1)
    full = [
        full_matmul, full_einsum_separate_maxima, full_softmax_broadcast,
        full_exp_sum_joint_maximum, full_channels_first, full_tokens_first, full_tanh,
        full_keys_left_out,
    ]  # fmt: skip
    found: dict[str, tuple[str, nn.Module]] = {f.__name__: ("AftFull", Layer(f, w)) for f in full}
    factors = 0.3 * _matrix(2, 4), 0.3 * _matrix(3, 4)
    for f in (full_factorised, full_factorised_by_length, full_factorised_einsum):
        found[f.__name__] = "AftFull", Layer(f, *factors)
    found["local_factorised"] = "AftLocal", Layer(local_factorised, *factors)
    # More than constant folding takes, and a rank that is more than the tokens it is tried at.
    long = [0.1 * torch.randn(250, 34) for _ in range(2)]
    for f in (full_factorised, full_factorised_by_length):
        found[f"{f.__name__}_long"] = "AftFull", Layer(f, *long)
    found["full_relative"] = "AftFull", Layer(full_relative, torch.randn(41))
    found["full_distance"] = "AftFull", Layer(full_distance)
    for f in (full_causal, full_causal_by_product, full_causal_keys_left_out):
        found[f.__name__] = "CausalAftFull", Layer(f, w)
    for f in (local_product, local_where, local_row_maximum, local_where_by_length,
              local_band_by_length, local_exponentials):  # fmt: skip
        found[f.__name__] = "AftLocal", Layer(f, w)
    simple = [simple_softmax, simple_exp_sum, simple_shifted, simple_einsum, simple_heads,
              simple_log_softmax, simple_keys_left_out, simple_mask_added,
              simple_mask_multiplied, simple_mask_filled, simple_masks_of_two_kinds]  # fmt: skip
    found |= {f.__name__: ("AftSimple", Layer(f)) for f in simple}
    found["simple_causal"] = "CausalAftSimple", Layer(simple_causal)
    found |= implementations_aft_conv.layers(0.5 * _matrix(4, 5)[:HEADS])
    efficient = [
        efficient_einsum, efficient_matmul, efficient_quadratic, efficient_one_head_scaled,
        efficient_exp_sum, efficient_scaled_by_width, efficient_batch_of_heads, efficient_masked,
        efficient_mask_filled, efficient_values_left_out,
    ]  # fmt: skip
    found |= {f.__name__: ("EfficientAttention", Layer(f)) for f in efficient}
    linear = [linear_einsum, linear_matmul, linear_where, linear_relu, linear_mask_multiplied,
              linear_mask_filled, linear_ellipses]  # fmt: skip
    found |= {f.__name__: ("NormalizedLinearAttention", Layer(f)) for f in linear}
    for f in (linear_causal, linear_causal_scores, linear_causal_tril, linear_causal_ones,
              linear_causal_filled, linear_causal_filled_by_length,
              linear_causal_mask_filled):  # fmt: skip
        found[f.__name__] = "CausalNormalizedLinearAttention", Layer(f)
    for pool in ("matmul", "einsum", "exp-sum"):
        found[f"fastformer_{pool}"] = "Fastformer", Fastformer(pool)
    found["fastformer_masked"] = "Fastformer", MaskedFastformer(masked=True)
    return found
