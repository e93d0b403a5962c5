"""Functions that resemble a mechanism but compute something else: none may be rewritten as it.

The product of features and values in some of them may be rewritten; all else stays.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from . import look_alikes_aft_conv, look_alikes_products
from .implementations.fastformer import EspnetFastformer
from .layer import DIM, HEADS, TOKENS, Layer, bias, elu_features, heads, merged


def _linear(q: Tensor, k: Tensor, v: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """Linear attention with an eps, its queries multiplied by one tensor above, one below."""
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    den = (q * below[:, None] * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged((q * above[:, None]) @ (k.transpose(2, 3) @ v) / (den + 1e-6))


def linear_rows_masked_below_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    counts = (q[..., :1] > -1.0).float()
    return _linear(q, k, v, torch.ones_like(counts), counts)


def linear_rows_masked_by_others(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _linear(q, k, v, (v[..., :1] > -1.0).float(), (q[..., :1] > -1.0).float())


def linear_scaled_below_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    by = torch.full_like(q[..., :1], 2.0)
    return _linear(q, k, v, by / 2.0, 2.0 * by)


def simple_rows_filled_with_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mean = (k.softmax(1) * v).sum(1, keepdim=True).expand_as(v)
    return q.sigmoid() * mean.masked_fill(q[..., :1] < -1.0, 1.0)


def simple_numbers_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.sigmoid() * ((e * v).sum(1, keepdim=True) + 1.0) / (e.sum(1, keepdim=True) + 1.0)


def simple_causal_above_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.sigmoid() * (e * v).cumsum(1) / e.sum(1, keepdim=True)


def simple_not_normalized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * (k.exp() * v).sum(1, keepdim=True)


def simple_one_key_of_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * (v.softmax(2) * k).sum(1, keepdim=True)


def simple_one_key_by_softplus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.softplus(q) * (k.softmax(1) * v).sum(1, keepdim=True)


def pooling_of_one_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + (k.softmax(1) * v).sum(1, keepdim=True)


def dot_product_of_one_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * ((k @ q[..., :1].transpose(1, 2)).softmax(-1) @ v)


def efficient_query_not_normalized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (0.5 * q, k, v))
    return merged(q @ (k.softmax(-2).transpose(-1, -2) @ v))


def efficient_keys_not_normalized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.softmax(-1) @ (k.transpose(-1, -2) @ v))


def positions_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[1])
    return (-0.1 * (place[:, None] - place).abs()).softmax(-1) @ v


def mean_of_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) + v.mean(1, keepdim=True)


class FastformerWeighed(nn.Module):
    """Weights of a Fastformer that something multiplies, or logits that it fills or limits."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.query, self.key = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.alpha, self.beta = nn.Linear(DIM, HEADS), nn.Linear(DIM, HEADS)

    def pooled(self, logits: Tensor, x: Tensor, by: Tensor) -> Tensor:
        e = self.change(logits.transpose(1, 2), by)
        weight = (e / e.sum(-1, keepdim=True)).unsqueeze(2)
        return (weight @ heads(x)).transpose(1, 2).reshape(-1, 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        by = x[..., 0][:, None]
        q, k = self.query(x), self.key(x)
        p = k * self.pooled(self.alpha(q), q, by)
        return self.pooled(self.beta(p), p, by) * q


def _of_forms() -> dict[str, nn.Module]:
    """Return the _of_forms by name."""
    plain = [
        linear_rows_masked_below_alone, linear_rows_masked_by_others,
        linear_scaled_below_alone, simple_rows_filled_with_one, simple_numbers_added,
        simple_causal_above_alone, simple_not_normalized, efficient_query_not_normalized,
        efficient_keys_not_normalized, positions_alone, mean_of_tokens,
    ]  # fmt: skip
    of_one_key = [
        simple_one_key_of_channels, simple_one_key_by_softplus, pooling_of_one_key,
        dot_product_of_one_key,
    ]  # fmt: skip
    found: dict[str, nn.Module] = {f.__name__: Layer(f) for f in plain}
    found |= {f.__name__: Layer(f, keys=1) for f in of_one_key}
    found["fastformer_weights_multiplied"] = FastformerWeighed(lambda x, by: x.exp() * by.abs())
    found["fastformer_filled_with_ten"] = FastformerWeighed(
        lambda x, by: x.masked_fill(by < -1.0, -10.0).exp()
    )
    found["fastformer_limited"] = FastformerWeighed(
        lambda x, by: torch.where(by < -1.0, x.clamp(max=-1.0), x).exp()
    )
    return found


def cut_at_a_thousand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The slices take all of every document that recognition tries."""
    return q.sigmoid() * (k[:, :1000].softmax(1) * v[:, :1000]).sum(1, keepdim=True)


def in_blocks_of_a_thousand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blocks = (q.shape[1] + 999) // 1000
    weight = k.reshape(blocks * k.shape[0], -1, DIM).softmax(1).reshape(k.shape)
    return q.sigmoid() * (weight * v).sum(1, keepdim=True)


def queries_cut_at_a_thousand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q[:, :1000], k, v))
    mixed = merged(q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v))
    return nn.functional.pad(mixed, (0, 0, 0, k.shape[2] - mixed.shape[1]))


def of_longer_documents() -> dict[str, nn.Module]:
    """Return by name the _of_forms that equal a mechanism only up to a thousand tokens."""
    few = [cut_at_a_thousand, in_blocks_of_a_thousand, queries_cut_at_a_thousand]
    return {f.__name__: Layer(f) for f in few}


SOFTMAX_ATTENTION = frozenset(("dot_product", "dot_product_gated", "dot_product_of_one_key"))
PRODUCTS = frozenset((
    "cross_masked_below_alone",
    "cross_of_queries_below",
    "efficient_axes_swapped",
    "efficient_both_over_channels",
    "efficient_both_over_tokens",
    "efficient_channels_left_out",
    "efficient_keys_not_normalized",
    "efficient_over_all_channels",
    "efficient_over_heads",
    "efficient_query_not_normalized",
    "linear_causal_above_alone",
    "linear_masked_below_alone",
    "linear_normalized_by_maximum",
    "linear_opposite_mask_below",
    "linear_other_mask_below",
    "linear_padded_as_the_last_key",
    "linear_padded_by_two_numbers",
    "linear_padded_clamped",
    "linear_padded_column_before_taken",
    "linear_padded_in_front",
    "linear_padded_tokens",
    "linear_padded_two_columns_taken",
    "linear_padded_with_a_half",
    "linear_padded_with_a_half_and_no_eps",
    "linear_padded_with_zeros",
    "linear_rows_masked_below_alone",
    "linear_rows_masked_by_others",
    "linear_scaled_below_alone",
    "products_clamped_above",
    "products_clamped_and_eps",
    "products_clamped_on_both_sides",
    "products_clamped_to_zero",
    "products_eps_above",
    "products_eps_of_keys",
    "products_eps_subtracted",
    "products_keys_over_channels",
    "products_magnitude_clamped",
    "products_of_cosines_below",
    "products_of_different_values",
    "products_of_other_features_below",
    "products_of_other_heads",
    "products_of_queries_below",
    "products_root_of_total",
    "products_sines_swapped_below",
))  # fmt: skip
"""The layers with a product of features and values, which the operator computes without normalizer.

All else stays. AFT and dot-product attention have no such product.
"""
NOT_FINITE = "linear_padded_with_a_half_and_no_eps"
"""The layer that divides by a normalizer of 0 for some queries."""

# Wrong axes


def simple_softmax_over_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * (k.softmax(2) * v).sum(1, keepdim=True)


def simple_all_over_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * (k.softmax(2) * v).sum(2, keepdim=True)


def simple_over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * (k.softmax(0) * v).sum(0, keepdim=True)


def full_over_queries(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    logits = k[:, None] + bias(w, q.shape[1])[None, :, :, None]
    return (logits.softmax(1) * v[:, None]).sum(2) * q.sigmoid()


def efficient_axes_swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.softmax(-2) @ (k.softmax(-1).transpose(-1, -2) @ v))


def efficient_both_over_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.softmax(-1) @ (k.softmax(-1).transpose(-1, -2) @ v))


def efficient_both_over_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.softmax(-2) @ (k.softmax(-2).transpose(-1, -2) @ v))


def efficient_over_all_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads(q.softmax(-1)), heads(k.softmax(1)), heads(v)
    return merged(q @ (k.transpose(-1, -2) @ v))


def efficient_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.softmax(1) @ (k.softmax(-2).transpose(-1, -2) @ v))


def dot_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged((q @ k.transpose(-1, -2)).softmax(-1) @ v)


def dot_product_gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * ((k @ k.transpose(-1, -2)).softmax(-1) @ v)


# Maxima that are not over the tokens


def simple_maximum_over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(k - k.amax(0, keepdim=True))
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def simple_maximum_over_everything(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(k - k.max())
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def full_maximum_over_the_batch(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e, ek = bias(w, q.shape[1]).exp(), torch.exp(k - k.amax((0, 1), keepdim=True))
    return q.sigmoid() * (e @ (ek * v)) / (e @ ek)


def simple_maximum_over_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(k - k.amax(2, keepdim=True))
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


# Clamps and additions


def simple_clamped_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.clamp(max=40.0).exp()
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def simple_clamped_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp().clamp(max=1e15)
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def simple_clamped_denominator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True).clamp(min=1e-12)


def full_clamped_bias(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = torch.exp((k[:, None] + bias(w, q.shape[1])[..., None]).clamp(max=30.0))
    return q.sigmoid() * (e * v[:, None]).sum(2) / e.sum(2)


# Other weights, other pooling


def full_other_keys_below(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = bias(w, q.shape[1]).exp()
    return q.sigmoid() * (e @ (k.exp() * v)) / (e @ q.exp())


def full_bias_of_channels(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    tokens = q.shape[1]
    logits = k[:, None] + bias(w, tokens)[None, :, :, None] * w[0, :DIM]
    return (logits.softmax(2) * v[:, None]).sum(2) * q.sigmoid()


def simple_mean_of_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * (k.softmax(1) * v).mean(1, keepdim=True) * v


def simple_greatest_value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * (k.softmax(1) * v).amax(1, keepdim=True)


def simple_relu_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.relu() + 1e-3
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def simple_gate_of_softplus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.softplus(q) * (k.softmax(1) * v).sum(1, keepdim=True)


def pooling(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v + (k.softmax(1) * v).sum(1, keepdim=True)


def linear_normalized_by_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    return merged(q @ (k.transpose(2, 3) @ v) / (q * k.amax(2, keepdim=True)).sum(-1, keepdim=True))


# What only a long document shows


def simple_of_the_first_50_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sigmoid() * (k[:, :50].softmax(1) * v[:, :50]).sum(1, keepdim=True)


def simple_in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = q.shape[1]
    q, k, v = (nn.functional.pad(x, (0, 0, 0, -tokens % 64)) for x in (q, k, v))
    q, k, v = (x.view(x.shape[0], -1, 64, DIM) for x in (q, k, v))
    mixed = q.sigmoid() * (k.softmax(2) * v).sum(2, keepdim=True)
    return mixed.reshape(q.shape[0], -1, DIM)[:, :tokens]


def simple_scaled_beyond_64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    by = torch.arange(q.shape[1]).amax().clamp(min=64) / 64
    return q.sigmoid() * ((k * by).softmax(1) * v).sum(1, keepdim=True)


def simple_scaled_by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    padded = nn.functional.pad(k, (0, 0, 0, -k.shape[1] % 64))
    blocks = padded.view(k.shape[0], -1, 64, DIM).shape[1]
    return q.sigmoid() * (k.softmax(1) * v).sum(1, keepdim=True) * blocks


def linear_of_the_last_64_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[1])
    q, k, v = map(heads, (q, k, v))
    scores = elu_features(q) @ elu_features(k).transpose(2, 3)
    scores = scores * ((place[:, None] - place) % 1000 < 64)
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


class FastformerPoolsKeys(nn.Module):
    """The second pooling is of the keys, not of keys times the pooled query."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.alpha, self.beta = nn.Linear(DIM, HEADS), nn.Linear(DIM, HEADS)

    def pooled(self, logits: Tensor, x: Tensor) -> Tensor:
        weight = logits.transpose(1, 2).softmax(-1).unsqueeze(2)
        return (weight @ heads(x)).transpose(1, 2).reshape(-1, 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x), self.key(x)
        p = k * self.pooled(self.alpha(q), q)
        return self.pooled(self.beta(p), k) * q


class FastformerOtherLogits(FastformerPoolsKeys):
    """The second logits are of the keys, not of keys times the pooled query."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x), self.key(x)
        p = k * self.pooled(self.alpha(q), q)
        return self.pooled(self.beta(k), p) * q


class FastformerOtherFill(EspnetFastformer):
    """The weights that are filled with 0 are those of other tokens than the filled logits."""

    def pooled(self, x: Tensor, att: nn.Linear, mask: Tensor) -> Tensor:
        logits = att(x).transpose(1, 2).masked_fill(mask, self.filling)
        weight = torch.softmax(logits, -1).masked_fill(x[..., 0][:, None] > 1.0, 0.0)
        return (weight.unsqueeze(2) @ heads(x)).transpose(1, 2).reshape(-1, 1, DIM)


class FastformerOnlyWeightsFilled(EspnetFastformer):
    """The weights of tokens are filled with 0, and their logits are not filled."""

    def pooled(self, x: Tensor, att: nn.Linear, mask: Tensor) -> Tensor:
        weight = torch.softmax(att(x).transpose(1, 2), -1).masked_fill(mask, 0.0)
        return (weight.unsqueeze(2) @ heads(x)).transpose(1, 2).reshape(-1, 1, DIM)


def layers() -> dict[str, nn.Module]:
    """Return the layers by name."""
    torch.manual_seed(0)
    w = torch.randn(TOKENS, TOKENS)
    plain = [
        simple_softmax_over_channels, simple_all_over_channels, simple_over_the_batch,
        efficient_axes_swapped, efficient_both_over_channels, efficient_both_over_tokens,
        efficient_over_all_channels, efficient_over_heads, dot_product, dot_product_gated,
        simple_maximum_over_the_batch, simple_maximum_over_everything,
        simple_maximum_over_channels, simple_clamped_keys, simple_clamped_weights,
        simple_clamped_denominator, simple_mean_of_values,
        simple_greatest_value, simple_relu_weights, simple_gate_of_softplus, pooling,
        linear_normalized_by_maximum,
    ]  # fmt: skip
    biased = [
        full_over_queries, full_maximum_over_the_batch,
        full_clamped_bias, full_other_keys_below, full_bias_of_channels,
    ]  # fmt: skip
    found: dict[str, nn.Module] = {f.__name__: Layer(f) for f in plain}
    found |= {f.__name__: Layer(f, w) for f in biased}
    found |= look_alikes_products.masked(w) | _of_forms()
    found |= look_alikes_products.layers()
    found |= look_alikes_aft_conv.layers(0.5 * w[:HEADS, :5])
    found["fastformer_pools_keys"] = FastformerPoolsKeys()
    found["fastformer_other_logits"] = FastformerOtherLogits()
    found["fastformer_other_fill"] = FastformerOtherFill(-1e9)
    found["fastformer_only_weights_filled"] = FastformerOnlyWeightsFilled(-1e9)
    return found


def of_long_documents() -> dict[str, nn.Module]:
    """Return by name the layers that equal a mechanism only for documents of a few tokens."""
    few = [simple_of_the_first_50_keys, simple_in_blocks, simple_scaled_beyond_64,
           simple_scaled_by_blocks, linear_of_the_last_64_keys]  # fmt: skip
    return {f.__name__: Layer(f) for f in few}
