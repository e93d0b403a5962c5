"""AFT-full, AFT-simple and AFT-local as other people write them.

Keys may be fewer than values: one for all channels, as in MobileViTv2, or one for each head.
"""

import math

import torch
from torch import Tensor, nn

from ..layer import HEADS, TOKENS, Layer, bias, heads, matrix, merged


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


def full_factorized(q: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return full_matmul(q, k, v, left @ right.t())


def full_factorized_by_length(q: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> Tensor:
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


def full_factorized_einsum(q: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> Tensor:
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


def full_causal_compared(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    place = torch.arange(q.shape[1])
    e = torch.where(place[:, None] < place, 0.0, bias(w, q.shape[1]).exp())
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


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    w = 0.5 * matrix(1)
    full = [
        full_matmul, full_einsum_separate_maxima, full_softmax_broadcast,
        full_exp_sum_joint_maximum, full_channels_first, full_tokens_first, full_tanh,
        full_keys_left_out,
    ]  # fmt: skip
    found: dict[str, tuple[str, nn.Module]] = {f.__name__: ("AftFull", Layer(f, w)) for f in full}
    for f in (full_factorized, full_factorized_by_length, full_factorized_einsum):
        found[f.__name__] = "AftFull", Layer(f, 0.3 * matrix(2, 4), 0.3 * matrix(3, 4))
    # More than constant folding takes, and a rank that is more than the tokens it is tried at.
    long = [0.1 * torch.randn(250, 34) for _ in range(2)]
    for f in (full_factorized, full_factorized_by_length):
        found[f"{f.__name__}_long"] = "AftFull", Layer(f, *long)
    found["full_relative"] = "AftFull", Layer(full_relative, torch.randn(41))
    found["full_distance"] = "AftFull", Layer(full_distance)
    for f in (
        full_causal, full_causal_by_product, full_causal_compared, full_causal_keys_left_out
    ):  # fmt: skip
        found[f.__name__] = "CausalAftFull", Layer(f, w)
    found |= _local_layers() | _simple_layers() | _layers_of_few_keys() | _separable_layers()
    return found


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


def simple_causal_compared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[1])
    counts = place[:, None] - place >= 0
    weight = k[:, None].masked_fill(~counts[..., None], -math.inf).softmax(2)
    return (weight * v[:, None]).sum(2) * q.sigmoid()


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


def simple_weights_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights are 0, and not NaN, where no token counts."""
    left_out = v[..., :1] < -1.0
    weight = k.masked_fill(left_out, -math.inf).softmax(1).masked_fill(left_out, 0.0)
    return q.sigmoid() * (weight * v).sum(1, keepdim=True)


def simple_keys_of_unit_norm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The norm has a minimum, and the keys are not clamped."""
    weight = (8 * nn.functional.normalize(k, dim=-1)).softmax(1)
    return q.sigmoid() * (weight * v).sum(1, keepdim=True)


def simple_values_over_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Maxima of values and keys over the channels, which are not subtracted."""
    v, k = (x / x.abs().amax(-1, keepdim=True) for x in (v, k))
    return q.sigmoid() * (k.softmax(1) * v).sum(1, keepdim=True)


def _simple_layers() -> dict[str, tuple[str, nn.Module]]:
    simple = [
        simple_softmax, simple_exp_sum, simple_shifted, simple_einsum, simple_heads,
        simple_log_softmax, simple_keys_left_out, simple_mask_added, simple_mask_multiplied,
        simple_mask_filled, simple_masks_of_two_kinds, simple_keys_of_unit_norm,
        simple_values_over_largest, simple_weights_filled,
    ]  # fmt: skip
    found: dict[str, tuple[str, nn.Module]] = {f.__name__: ("AftSimple", Layer(f)) for f in simple}
    for f in (simple_causal, simple_causal_compared):
        found[f.__name__] = "CausalAftSimple", Layer(f)
    return found


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


def _local_layers() -> dict[str, tuple[str, nn.Module]]:
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


def simple_one_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.tanh() * (k.softmax(1).transpose(1, 2) @ v)


def simple_key_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = k.transpose(1, 2).softmax(-1)
    return merged(heads(q.sigmoid()) * (weights.unsqueeze(2) @ heads(v)))


def simple_one_negated_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return simple_softmax(q, -k, v)


def simple_one_key_left_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return simple_keys_left_out(q, k, v)


def simple_one_causal_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return simple_causal(q, k, v)


def full_one_key(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    weights = (k.transpose(1, 2) + bias(w, q.shape[1])).softmax(-1)
    return q.sigmoid() * (weights @ v)


def full_causal_key_of_heads(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    after = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    w = bias(w.masked_fill(after, -math.inf), q.shape[1])
    return q.sigmoid() * merged((k.transpose(1, 2)[:, :, None] + w).softmax(-1) @ heads(v))


def local_one_key(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    place = torch.arange(TOKENS)
    return full_matmul(q, k, v, w * ((place[:, None] - place).abs() < 4))


def _layers_of_few_keys() -> dict[str, tuple[str, nn.Module]]:
    w = 0.5 * matrix(1)
    found: dict[str, tuple[str, nn.Module]] = {
        f.__name__: ("AftSimple", Layer(f, keys=1))
        for f in (simple_one_key, simple_one_negated_key, simple_one_key_left_out)
    }
    found["simple_key_of_heads"] = "AftSimple", Layer(simple_key_of_heads, keys=HEADS)
    found["simple_one_causal_key"] = "CausalAftSimple", Layer(simple_one_causal_key, keys=1)
    found["full_one_key"] = "AftFull", Layer(full_one_key, w, keys=1)
    f = full_causal_key_of_heads
    found[f.__name__] = "CausalAftFull", Layer(f, w, keys=HEADS)
    found["local_one_key"] = "AftLocal", Layer(local_one_key, w, keys=1)
    return found


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


def _separable_layers() -> dict[str, tuple[str, nn.Module]]:
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
