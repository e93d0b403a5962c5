"""Changes of linear attention with any features: its keys, its normalizer, its axes."""

import torch
from torch import Tensor, nn

from .implementations.cross_attention import CrossLayer
from .implementations.feature_maps import angles
from .layer import Layer, elu_features, heads, merged


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
    return found | {f.__name__: CrossLayer(f) for f in cross}
