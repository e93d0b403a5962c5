from collections.abc import Callable

import pytest
import tiny_models
import torch
from torch import Tensor, nn
from torch.nn import functional

from aftexport.capture.capture import capture
from aftexport.capture.input_spec import input_spec
from aftexport.capture.vocabulary import MAX_IDS
from aftexport.errors import TraceError, UsageError

Forward = Callable[["Tables", Tensor], Tensor]


class Tables(tiny_models.Computed):
    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        self.small, self.bag = nn.Embedding(100, 16), nn.EmbeddingBag(250, 16)
        self.register_buffer("shards", torch.arange(400) % 300)


def classes(m: Tables, ids: Tensor) -> Tensor:
    return m.mean(torch.cat([torch.full((ids.shape[0], 1), 2), ids], 1))


def assigned(m: Tables, ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[ids == 5] = 299
    return m.mean(ids)


def overwritten(m: Tables, ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, 0] = 300
    return m.mean(ids)


def from_positions(m: Tables, ids: Tensor) -> Tensor:
    """Number positions as RoBERTa does, and select the tokens that an id points at."""
    real = ids.ne(1).int()
    places = (real.cumsum(1).type_as(real) * real).clamp(max=99).long()
    x = m.embedding(ids) + m.small(places)
    return x[torch.arange(x.shape[0]), ids.argmax(-1)]


def quantized(m: Tables, ids: Tensor) -> Tensor:
    """Look up numbers computed from embeddings, which are not ids."""
    scores = m.embedding(ids).mean(2)
    return m.small((scores * 10).long().clamp(0, 99)).mean(1)


def bigrams(m: Tables, ids: Tensor) -> Tensor:
    return m.mean(ids) + m.small((ids * 31 + ids.roll(1, 1)) % 100).mean(1)


@pytest.mark.parametrize(
    ("forward", "size", "embedding"),
    [
        (lambda m, ids: m.mean(ids.int().view(-1, ids.shape[1]).unsqueeze(0)[0].long()), 300, 1),
        (lambda m, ids: m.mean(functional.pad(ids.t().contiguous().t().flip(1), (1, 0))), 300, 1),
        (classes, 300, 1),
        (lambda m, ids: m.mean(torch.where(ids == 7, 0, ids.masked_fill(ids == 3, 1))), 300, 1),
        (assigned, 300, 1),
        (from_positions, 300, 1),
        (quantized, 300, 1),
        (bigrams, 300, 1),
        (lambda m, ids: m.mean(ids) + m.small(ids).mean(1), 100, 2),
        (lambda m, ids: m.bag(ids), 250, 3),
        (lambda m, ids: m.embedding.weight[ids].mean(1), 300, 1),
        (lambda m, ids: m.embedding.weight.index_select(0, ids[:, 0]), 300, 1),
        (lambda m, ids: functional.one_hot(ids, 300).float().mean(1)[:, :16], 300, 0),
        (lambda m, ids: m.mean(m.shards[ids]), 400, 0),
        (lambda m, ids: m.mean(ids + 1), 299, 0),
        (lambda m, ids: m.mean(ids // 4), 1200, 0),
        (lambda m, ids: m.small(ids.clamp(max=99)).mean(1), MAX_IDS, 2),
        (lambda m, ids: m.small(ids.clamp(0, 98) + 1).mean(1), MAX_IDS, 0),
        (lambda m, ids: m.small((ids * 2654435761 + 17) % 100).mean(1), MAX_IDS, 0),
        (lambda m, ids: m.small(ids & 63).mean(1), MAX_IDS, 0),
    ],
)
def test_vocabulary_follows_ids(forward: Forward, size: int, embedding: int) -> None:
    """``embedding`` is the table with a row for each id: 0 none, 1 embedding, 2 small, 3 bag."""
    spec = input_spec(capture(Tables(forward)))
    names = ["", "embedding.weight", "small.weight", "bag.weight"]
    assert (spec.vocab_size, spec.embedding) == (size, names[embedding])


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda m, ids: m.mean(ids - 1), "against the 300 rows"),
        (overwritten, "against the 300 rows"),
        (lambda m, ids: m.mean(ids.float().sqrt().long()), "against the 300 rows"),
        (lambda m, ids: ids[..., None].float().expand(-1, -1, 16).mean(1), "in an embedding"),
    ],
)
def test_vocabulary_unknown_is_asked_for(forward: Forward, said: str) -> None:
    program = capture(Tables(forward))
    with pytest.raises(TraceError, match=said) as refused:
        input_spec(program)
    assert "--vocab-size" in refused.value.remedy
    assert input_spec(program, 50).vocab_size == 50


def test_vocabulary_may_be_smaller_than_table() -> None:
    program = capture(tiny_models.Bag())
    assert input_spec(program, 290).vocab_size == 290
    with pytest.raises(UsageError, match="at most the model's 300 ids, got 301"):
        input_spec(program, 301)
