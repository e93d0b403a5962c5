"""Weighted sums that match no mechanism: the reason is the condition that fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftexport.recognition.patterns.pattern import OTHER_KEYS

from .graphs import BATCH, TOKENS, exported, fused, scripted
from .layer import DIM, Layer, bias, elu_features, heads, matrix, merged

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
PAIRS = "the weights are of pairs of query and key, as in dot-product attention"
NAN = "the weights go through nan_to_num, or another guard of NaN before they weigh the values"
TWICE = "its query, key or value has a sum within, as a softmax of a softmax has"


def by_scores(weigh: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = map(heads, (q, k, v))
        return merged(weigh(q @ k.transpose(-1, -2)) @ v)

    return attend


def by_keys(weigh: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.sigmoid() * (weigh(k) * v).sum(1, keepdim=True)

    return attend


def sinkhorn(steps: int, eps: float = 0.0) -> Callable[[Tensor], Tensor]:
    def weigh(scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        for _ in range(steps):
            weights = weights / (weights.sum(-2, keepdim=True) + eps)
            weights = weights / (weights.sum(-1, keepdim=True) + eps)
        return weights

    return weigh


def sinkhorn_of_logits(scores: Tensor) -> Tensor:
    for _ in range(3):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp()


def sinkhorn_of_scales(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    weights = (q @ k.transpose(-1, -2)).exp()
    rows, columns = torch.ones_like(q[..., :1]), torch.ones_like(q[..., :1])
    for _ in range(2):
        rows = 1 / (weights @ columns)
        columns = 1 / (weights.transpose(-1, -2) @ rows)
    return merged(rows * (weights @ (columns * v)))


def keys_over_both_axes(k: Tensor) -> Tensor:
    weights = k.exp()
    for _ in range(2):
        weights = weights / weights.sum(2, keepdim=True)
        weights = weights / weights.sum(1, keepdim=True)
    return weights


def without_nan(x: Tensor) -> Tensor:
    return torch.where(torch.isnan(x), torch.zeros_like(x), x)


def guarded_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp().nan_to_num()
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def guarded_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    scores = elu_features(q) @ elu_features(k).transpose(2, 3)
    return merged((scores / scores.sum(-1, keepdim=True)).nan_to_num() @ v)


def guarded_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.softmax(-1) @ (k.softmax(-2).nan_to_num().transpose(-1, -2) @ v))


def guarded_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.softmax(-1).nan_to_num() @ (k.softmax(-2).transpose(-1, -2) @ v))


def masked_and_guarded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = k.masked_fill(v[..., :1] < -0.5, -torch.inf).softmax(1)
    return q.sigmoid() * (kept.nan_to_num() * v).sum(1, keepdim=True)


def guarded_bias(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    logits = k[:, None] + bias(w, q.shape[1])[None, :, :, None]
    return (logits.softmax(2).nan_to_num() * v[:, None]).sum(2) * q.sigmoid()


def keys_twice_and_plain_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    k = k.softmax(-2)
    return merged(q @ ((k / k.sum(-1, keepdim=True)).transpose(-1, -2) @ v))


def query_twice_and_plain_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q = q.softmax(-1)
    return merged((q / q.sum(-2, keepdim=True)) @ (k.transpose(-1, -2) @ v))


def mixed_heads(scores: Tensor) -> Tensor:
    mixing = torch.eye(scores.shape[1]) + 0.1
    return torch.einsum("bhtu,hg->bgtu", scores.softmax(-1), mixing)


def eps_in_sum_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    below = torch.einsum("bhtd,bhd->bht", q, k.sum(2) + 1e-6)
    return merged(q @ (k.transpose(2, 3) @ v) / below[..., None])


def mean_with_eps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.sigmoid() * (e * v).mean(1, keepdim=True) / (e.mean(1, keepdim=True) + 1e-3)


def eps_of_each_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    total = e.sum(1, keepdim=True) + 1e-3 * q.shape[1]
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / total


def total_up_to_each_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.sigmoid() * (e / e.cumsum(1) * v).cumsum(1)


def total_up_to_the_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.cumsum(1)


def channels_before_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.softmax(2)
    return q.sigmoid() * (e * v).cumsum(1) / e.cumsum(1)


def efficient_up_to_the_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    context = (k.softmax(2)[..., None] * v[..., None, :]).cumsum(2)
    return merged((q.softmax(-1)[..., None, :] @ context).squeeze(-2))


def efficient_with_eps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    e = k.exp()
    weights = e / (e.sum(2, keepdim=True) + 1e-6)
    return merged(q.softmax(-1) @ (weights.transpose(2, 3) @ v))


def efficient_of_clamped_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.clamp(max=3.0).softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v))


REASONS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "Sinkhorn of one step": (by_scores(sinkhorn(1)), PAIRS),
    "Sinkhorn of many steps": (by_scores(sinkhorn(4)), PAIRS),
    "Sinkhorn with eps": (by_scores(sinkhorn(2, 1e-6)), PAIRS),
    "Sinkhorn of logits": (by_scores(sinkhorn_of_logits), PAIRS),
    "Sinkhorn of scales": (sinkhorn_of_scales, PAIRS),
    "softmaxes in turns": (by_scores(lambda s: s.softmax(-1).softmax(-2)), PAIRS),
    "softmax over the queries": (by_scores(lambda s: s.softmax(-2)), PAIRS),
    "softmax both ways": (by_scores(lambda s: s.softmax(-1) * s.softmax(-2)), PAIRS),
    "scores through nan_to_num": (by_scores(lambda s: s.softmax(-1).nan_to_num()), PAIRS),
    "mixed heads": (by_scores(mixed_heads), PAIRS),
    "keys over both axes": (by_keys(keys_over_both_axes), "more than one sum divides the weights"),
    "keys twice": (by_keys(lambda k: k.softmax(1).softmax(1)), TWICE),
    "keys clamped": (by_keys(lambda k: k.softmax(1).clamp(min=1e-3)), "weights go through Clip"),
    "keys through nan_to_num": (by_keys(lambda k: k.softmax(1).nan_to_num()), NAN),
    "keys through where": (by_keys(lambda k: without_nan(k.softmax(1))), NAN),
    "guarded exponentials": (guarded_exponentials, NAN),
    "guarded features": (guarded_features, NAN),
    "guarded keys": (guarded_keys, "the softmax of the keys goes through nan_to_num"),
    "guarded queries": (guarded_queries, "the softmax of the query goes through nan_to_num"),
    "keys twice and a plain query": (
        keys_twice_and_plain_query,
        "the query is not normalized by a softmax over its channels",
    ),
    "query twice and plain keys": (
        query_twice_and_plain_keys,
        "the keys are not normalized by a softmax over the tokens",
    ),
    "masked and guarded": (masked_and_guarded, NAN),
    "eps in the sum of keys": (eps_in_sum_of_keys, "1e-06 is added to the sum of the keys"),
    "mean with eps": (mean_with_eps, "0.001 is added to a mean of the weights"),
    "eps of each token": (eps_of_each_token, "0.001 times the number of tokens is added"),
    "total up to each key": (total_up_to_each_key, "up to its own key, and not up to the query"),
    "total up to the query": (total_up_to_the_query, OTHER_KEYS),
    "channels before tokens": (channels_before_tokens, "more than one sum divides the weights"),
    "efficient up to the query": (efficient_up_to_the_query, OTHER_KEYS),
    "efficient with eps": (efficient_with_eps, "1e-06 is added to the denominator"),
    "efficient of a clamped query": (efficient_of_clamped_query, "the queries are clamped"),
}


WITH_PRODUCT = frozenset((
    "guarded keys", "guarded queries", "eps in the sum of keys", "efficient up to the query",
    "efficient with eps", "efficient of a clamped query",
))  # fmt: skip
"""The cases with a product of features and values, which is rewritten."""


def reasons(layer: nn.Module, make: Any, *, has_product: bool = False) -> list[str]:
    """Return the reasons of near misses, and of notes of products that are rewritten."""
    found, _ = fused(make(layer, torch.randn(2, 12, DIM), axes=(BATCH, TOKENS)))
    assert bool(found.matches) == has_product, found.matches
    given = [miss.reason for miss in found.near_misses]
    if has_product:
        assert {match.attributes.get("normalizer") for match in found.matches} == {"none"}
        notes = [match.note for match in found.matches]
        given += [note for note in notes if note != "a product without a normalizer"]
    return given


@pytest.mark.parametrize("name", REASONS)
def test_one_true_reason_is_given(name: str) -> None:
    function, reason = REASONS[name]
    given = reasons(Layer(function), scripted, has_product=name in WITH_PRODUCT)
    assert [reason in said for said in given] == [True], given


@pytest.mark.parametrize("name", ["Sinkhorn of many steps", "keys through nan_to_num"])
def test_reason_matches_other_exporter(name: str) -> None:
    function, reason = REASONS[name]
    assert reasons(Layer(function), exported) == [reason]


def test_guard_between_bias_and_values_named() -> None:
    assert reasons(Layer(guarded_bias, matrix(0)), scripted) == [NAN]


def test_axes_of_one_size_stay_distinct() -> None:
    """Channels and tokens are both 16. A guard on the keys does not guard pairs."""
    layer = Layer(REASONS["keys through nan_to_num"][0])
    found, _ = fused(scripted(layer, torch.randn(2, DIM, DIM), axes=()))
    assert [miss.reason for miss in found.near_misses] == [NAN]


def test_missing_batch_named_for_any_features() -> None:
    """The reason is never another feature than elu or relu, since features stay in the graph."""

    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.softplus(x)
            return x @ (x.T @ x) / (x @ x.sum(0, keepdim=True).T + 1e-6)

    found, _ = fused(scripted(Tokens(), torch.randn(12, DIM), axes=(TOKENS,)))
    assert found.matches == []
    (miss,) = found.near_misses
    assert "over the first axis, which may be the batch" in miss.reason


def test_constant_mask_of_the_numerator_named() -> None:
    """At a fixed length the mask is a constant, and the weights are still of keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lower = torch.ones(12, 12).tril()
        return q.sigmoid() * (lower @ (k.softmax(1) * v))

    found, _ = fused(scripted(Layer(attend), torch.randn(2, 12, DIM), axes=()))
    assert [miss.reason for miss in found.near_misses] == [OTHER_KEYS]


def test_quotient_of_sums_is_rejected() -> None:
    """It is not a weighted sum."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.sigmoid() * k.sum(1, keepdim=True) / v.square().sum(1, keepdim=True)

    assert reasons(Layer(attend), scripted) == []
