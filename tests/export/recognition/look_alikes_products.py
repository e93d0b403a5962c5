"""Changes of linear attention with any features, and masks that change a mechanism."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .implementations.feature_products import angles
from .implementations.linear_attention import CrossLayer
from .layer import HEADS, Layer, bias, elu_features, heads, merged


def _relu_features(*tensors: Tensor) -> list[Tensor]:
    return [heads(x.relu() + 1e-3) for x in tensors]


def _total(q: Tensor, k: Tensor) -> Tensor:
    return (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)


def products_of_queries_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The normalizer sums the features of the queries."""
    q, k = _relu_features(q, k)
    return merged(q @ (k.transpose(2, 3) @ heads(v)) / _total(q, q))


def products_of_other_features_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, other = (*_relu_features(q, k), heads(k).exp())
    return merged(q @ (k.transpose(2, 3) @ heads(v)) / (_total(q, other) + 1e-6))


def products_clamped_above(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = _relu_features(q, k)
    return merged(q @ (k.transpose(2, 3) @ heads(v)) / _total(q, k).clamp(max=1e2))


def products_clamped_on_both_sides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = _relu_features(q, k)
    return merged(q @ (k.transpose(2, 3) @ heads(v)) / _total(q, k).clamp(1e-6, 1e2))


def products_magnitude_clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q @ (k.transpose(2, 3) @ v) / _total(q, k).abs().clamp(min=1e-2))


def products_clamped_and_eps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = _relu_features(q, k)
    return merged(q @ (k.transpose(2, 3) @ heads(v)) / (_total(q, k) + 1.0).clamp(min=3.0))


def products_clamped_to_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q @ (k.transpose(2, 3) @ v) / (_total(q, k).clamp(min=-1.0) + 2.0))


def products_eps_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The eps is added to the sum of the keys."""
    q, k = _relu_features(q, k)
    below = (q * (k.sum(2, keepdim=True) + 0.5)).sum(-1, keepdim=True)
    return merged(q @ (k.transpose(2, 3) @ heads(v)) / below)


def products_eps_above(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = _relu_features(q, k)
    return merged((q @ (k.transpose(2, 3) @ heads(v)) + 0.5) / _total(q, k))


def products_eps_subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = _relu_features(q, k)
    return merged(q @ (k.transpose(2, 3) @ heads(v)) / (_total(q, k) - 0.5))


def products_root_of_total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = _relu_features(q, k)
    return merged(q @ (k.transpose(2, 3) @ heads(v)) / (_total(q, k) + 1e-6).sqrt())


def _cosines(q: Tensor, k: Tensor, v: Tensor, *, swapped: bool, values: bool) -> Tensor:
    angle = angles(q.shape[1])[:, None]
    q, k, v = map(heads, (q.relu() + 1e-3, k.relu() + 1e-3, v))
    q_cos, q_sin, k_cos, k_sin = q * angle.cos(), q * angle.sin(), k * angle.cos(), k * angle.sin()
    other = v.roll(1, -1) if values else v
    above = q_cos @ (k_cos.transpose(2, 3) @ v) + q_sin @ (k_sin.transpose(2, 3) @ other)
    pairs = ((q_cos, k_sin), (q_sin, k_cos)) if swapped else ((q_cos, k_cos), (q_sin, k_sin))
    below = _total(*pairs[0]) + _total(*pairs[1])
    return merged(above / (below + 1e-6))


def products_sines_swapped_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _cosines(q, k, v, swapped=True, values=False)


def products_of_different_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _cosines(q, k, v, swapped=False, values=True)


def products_of_cosines_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The sine's part is missing from the normalizer."""
    angle = angles(q.shape[1])[:, None]
    q, k, v = map(heads, (q.relu() + 1e-3, k.relu() + 1e-3, v))
    q_cos, q_sin, k_cos, k_sin = q * angle.cos(), q * angle.sin(), k * angle.cos(), k * angle.sin()
    above = q_cos @ (k_cos.transpose(2, 3) @ v) + q_sin @ (k_sin.transpose(2, 3) @ v)
    return merged(above / (_total(q_cos, k_cos) + 1e-6))


def products_keys_over_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in diffusion models, but a softmax of each key over its channels."""
    q, k, v = map(heads, (q, k, v))
    return merged(q @ (k.softmax(-1).transpose(2, 3) @ v))


def products_of_other_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The normalizer is that of the next head."""
    q, k = _relu_features(q, k)
    return merged(q @ (k.transpose(2, 3) @ heads(v)) / _total(q, k).roll(1, 1))


def simple_eps_after_the_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An eps beside weights of which the largest is 1."""
    e = (k - k.amax(1, keepdim=True)).exp()
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / (e.sum(1, keepdim=True) + 1e-2)


def simple_eps_subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / (e.sum(1, keepdim=True) - 1e-3)


def simple_scaled_and_eps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The eps is added to a tensor of numbers times the sum."""
    e = k.exp()
    below = e.sum(1, keepdim=True) * (1 + q.square()) + 1e-3
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / below


def separable_over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.relu() * (v * k.softmax(0)).sum(0, keepdim=True)


def separable_leaky(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.leaky_relu(q) * (v * k.softmax(1)).sum(1, keepdim=True)


def separable_relu_of_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * (v * k.softmax(1)).sum(1, keepdim=True)).relu()


def cross_of_queries_below(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """The normalizer sums other tokens than the numerator."""
    of_queries = elu_features(heads(q))
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    return merged(q @ (k.transpose(2, 3) @ v) / (_total(q, of_queries) + 1e-6))


def cross_masked_below_alone(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor
) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    below = _total(q, k * counts[:, None, :, None]) + 1e-6
    return merged(q @ (k.transpose(2, 3) @ v) / below)


def cross_causal(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """A triangle over more keys than queries."""
    q, k, v = map(heads, (q, k, v))
    scores = torch.tril(elu_features(q) @ elu_features(k).transpose(2, 3))
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def cross_dot_product(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged((q @ k.transpose(2, 3) / 2.0).softmax(-1) @ v)


def layers() -> dict[str, nn.Module]:
    """Return the layers by name."""
    plain = [
        products_of_queries_below, products_of_other_features_below, products_clamped_above,
        products_clamped_on_both_sides, products_magnitude_clamped, products_clamped_and_eps,
        products_clamped_to_zero, products_eps_of_keys, products_eps_above,
        products_eps_subtracted, products_root_of_total,
        products_sines_swapped_below,
        products_of_different_values, products_of_cosines_below, products_keys_over_channels,
        products_of_other_heads, simple_eps_after_the_maximum, simple_eps_subtracted,
        simple_scaled_and_eps,
    ]  # fmt: skip
    of_one_key = [separable_over_the_batch, separable_leaky, separable_relu_of_all]
    found: dict[str, nn.Module] = {f.__name__: Layer(f) for f in plain}
    found |= {f.__name__: Layer(f, keys=1) for f in of_one_key}
    cross = [
        cross_of_queries_below, cross_masked_below_alone, cross_causal, cross_dot_product,
    ]  # fmt: skip
    return found | _of_parts() | {f.__name__: CrossLayer(f) for f in cross}


def _product(
    q: Tensor, k: Tensor, v: Tensor, columns: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """All of the product but its last column, and that."""
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    out = q @ (k.transpose(2, 3) @ columns(v))
    return out[..., :-1], out[..., -1:] + 1e-3


def linear_padded_with_a_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above, below = _product(q, k, v, lambda v: pad(v, (0, 1), value=0.5))
    return merged(above / below)


def linear_padded_with_a_half_and_no_eps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above, below = _product(q, k, v, lambda v: pad(v, (0, 1), value=0.5))
    return merged(above / (below - 1e-3))


def linear_padded_with_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above, below = _product(q, k, v, lambda v: pad(v, (0, 1)))
    return merged(above / below)


def linear_padded_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above, below = _product(q, k, v, lambda v: pad(v, (1, 0), value=1.0))
    return merged(above / below)


def linear_padded_by_two_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The column of ones is the last but one, and not the one that divides."""
    above, below = _product(
        q, k, v, lambda v: pad(pad(v[..., 1:], (0, 1), value=1.0), (0, 1), value=2.0)
    )
    return merged(above / below)


def linear_padded_as_the_last_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A key more, whose features and value are 1."""
    q, k, v = map(heads, (q, k, v))
    q, k = q.relu(), pad(k.relu(), (0, 0, 0, 1), value=1.0)
    v = pad(pad(v, (0, 1), value=1.0), (0, 0, 0, 1), value=1.0)
    out = q @ (k.transpose(2, 3) @ v)
    return merged(out[..., :-1] / (out[..., -1:] + 1e-3))


def linear_padded_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add a query whose output divides the others, as if tokens came before channels."""
    q, k, v = map(heads, (q, k, v))
    out = pad(q.relu(), (0, 0, 0, 1), value=1.0) @ (k.relu().transpose(2, 3) @ v)
    return merged(out[:, :, :-1] / (out[:, :, -1:] + 1e-3))


def linear_padded_two_columns_taken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    out = q @ (k.transpose(2, 3) @ pad(v, (0, 1), value=1.0))
    return merged(out[..., :-1] / (out[..., -2:].sum(-1, keepdim=True) + 1e-3))


def linear_padded_column_before_taken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    out = q @ (k.transpose(2, 3) @ pad(v, (0, 1), value=1.0))
    return merged(out[..., :-1] / (out[..., -2:-1] + 1e-3))


def linear_padded_clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    out = q @ (k.transpose(2, 3) @ pad(v, (0, 1), value=1.0))
    return merged(out[..., :-1] / (out[..., -1:].clamp(max=1.0) + 1e-3))


def _of_parts() -> dict[str, nn.Module]:
    """Return the _of_parts by name."""
    found = [
        linear_padded_with_a_half, linear_padded_with_a_half_and_no_eps, linear_padded_with_zeros,
        linear_padded_in_front, linear_padded_by_two_numbers, linear_padded_as_the_last_key,
        linear_padded_tokens, linear_padded_two_columns_taken, linear_padded_column_before_taken,
        linear_padded_clamped,
    ]  # fmt: skip
    return {f.__name__: Layer(f) for f in found}


def _scores(q: Tensor, k: Tensor, first: int, *, upper: bool) -> Tensor:
    """Scores of which those above or below a diagonal, from the ``first`` on, are made 0."""
    ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
    left_out = torch.triu(ones, first) if upper else torch.tril(ones, first)
    return (elu_features(q) @ elu_features(k).transpose(2, 3)).masked_fill(left_out, 0.0)


def _of_scores(q: Tensor, k: Tensor, v: Tensor, first: int, *, upper: bool) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    scores = _scores(q, k, first, upper=upper)
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_of_keys_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _of_scores(q, k, v, 0, upper=True)


def linear_of_keys_up_to_the_next(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _of_scores(q, k, v, 2, upper=True)


def linear_of_keys_from_here(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _of_scores(q, k, v, -1, upper=False)


def linear_of_keys_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _of_scores(q, k, v, 0, upper=False)


def linear_of_positions_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[1])
    q, k, v = map(heads, (q, k, v))
    scores = (elu_features(q) @ elu_features(k).transpose(2, 3)) * (place[:, None] > place)
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_causal_above_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    total = (elu_features(q) @ elu_features(k).transpose(2, 3)).sum(-1, keepdim=True)
    return merged(_scores(q, k, 1, upper=True) @ v / total)


def linear_masked_below_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left_out = (v[..., :1] < -1.0)[:, None]
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    den = (q * k.masked_fill(left_out, 0.0).sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.transpose(2, 3) @ v) / den)


def linear_other_mask_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = ((v[..., i : i + 1] < -1.0)[:, None] for i in (0, 1))
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    den = (q * k.masked_fill(first, 0.0).sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.masked_fill(second, 0.0).transpose(2, 3) @ v) / den)


def linear_opposite_mask_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left_out = (v[..., :1] < 0.0)[:, None]
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    den = (q * k.masked_fill(left_out, 0.0).sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.masked_fill(~left_out, 0.0).transpose(2, 3) @ v) / den)


def simple_masked_below_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    total = e.masked_fill(v[..., :1] < -1.0, 0.0).sum(1, keepdim=True)
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / total


def efficient_channels_left_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left_out = torch.arange(q.shape[-1] // HEADS) % 2 == 1
    q, k, v = map(heads, (q, k, v))
    q = q.masked_fill(left_out, -torch.inf)
    return merged(q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v))


def full_keys_much_lower(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    logits = k[:, None] + bias(w, q.shape[1])[None, :, :, None]
    weight = logits.masked_fill((v[..., 0] < -1.0)[:, None, :, None], -1e4).softmax(2)
    return (weight * v[:, None]).sum(2) * q.sigmoid()


def full_mask_of_queries_and_keys(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    logits = k[:, None] + bias(w, q.shape[1])[None, :, :, None]
    left_out = (q[..., :1] + v[..., 0][:, None]) < -3.0
    weight = logits.masked_fill(left_out[..., None], -torch.inf).softmax(2)
    return (weight * v[:, None]).sum(2) * q.sigmoid()


def masked(w: Tensor) -> dict[str, nn.Module]:
    """Return the _of_masks by name; ``w`` is a position bias."""
    plain = [
        linear_of_keys_before, linear_of_keys_up_to_the_next, linear_of_keys_from_here,
        linear_of_keys_after, linear_of_positions_before, linear_causal_above_alone,
        linear_masked_below_alone, linear_other_mask_below,
        linear_opposite_mask_below, simple_masked_below_alone, efficient_channels_left_out,
    ]  # fmt: skip
    found: dict[str, nn.Module] = {f.__name__: Layer(f) for f in plain}
    for f in (full_keys_much_lower, full_mask_of_queries_and_keys):
        found[f.__name__] = Layer(f, w)
    return found
