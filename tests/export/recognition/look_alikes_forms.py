"""Functions that resemble a recognized form of a mechanism but compute something else.

Masks of rows and numbers that are not outside, keys that channels share, weights that nothing
normalizes.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .layer import DIM, HEADS, Layer, elu_features, heads, merged


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


def layers() -> dict[str, nn.Module]:
    """Return the layers by name."""
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
    """Return by name the layers that equal a mechanism only up to a thousand tokens."""
    few = [cut_at_a_thousand, in_blocks_of_a_thousand, queries_cut_at_a_thousand]
    return {f.__name__: Layer(f) for f in few}
