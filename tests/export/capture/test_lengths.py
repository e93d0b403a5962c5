"""The lengths of documents that a captured model takes."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import tiny_models
import torch
from sampling import any_case
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.capture.input_spec import input_spec
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import TraceError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower


class PositionsOfTheRest(tiny_models.Positions):
    """torch fails at an assertion of its own, unless told that sizes may be 1."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)[:, 3:]
        n = x.shape[1]
        return self.head((x + self.positions.weight[:n]).sum(1))


@pytest.mark.parametrize(
    ("factory", "asked", "bounds"),
    [
        # All 32 of them is a length that torch.export takes another branch for.
        (tiny_models.Positions, None, (31, 32)),
        (tiny_models.PositionsOfEach, None, (31, 32)),
        (tiny_models.EmbeddedPositions, None, (32,)),
        # As above; and what the module says of its length is one too many.
        (tiny_models.ClassToken, None, (30, 31)),
        (tiny_models.ClassToken, 32, (30, 31)),
    ],
)
def test_position_table_bounds_length(
    factory: type[nn.Module], asked: int | None, bounds: tuple[int, ...]
) -> None:
    assert input_spec(capture(factory(), max_tokens=asked)).max_tokens in bounds


class EveryFourthPosition(tiny_models.Positions):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)[:, ::4]
        return self.head((x + self.positions.weight[: x.shape[1]]).mean(1))


def test_quarter_position_table_bounds_length() -> None:
    """The table has a row for every fourth token: the bound is four times its rows."""
    module = EveryFourthPosition().eval()
    program = capture(module)
    assert input_spec(program).max_tokens == 128
    for tokens in (1, 3, 4, 5, 128):
        ids = torch.randint(300, (2, tokens))
        torch.testing.assert_close(program.module()(ids), module(ids))


@pytest.mark.parametrize("limit", [None, 32])
def test_positions_after_short_document_are_captured(limit: int | None) -> None:
    module = PositionsOfTheRest().eval()
    program = capture(module, max_tokens=limit)
    assert input_spec(program).max_tokens == (limit or 35)
    for tokens in (1, 3, 4, 32, limit or 35):
        ids = torch.randint(300, (2, tokens))
        torch.testing.assert_close(program.module()(ids), module(ids))


def values_of_long_documents(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    """The branch of long documents runs in PyTorch; torch.export cannot capture it."""
    x = m.embedding(input_ids)
    if input_ids.shape[1] > 20:
        x = x / float(x.abs().max())
    return x.sum(1)


class ChangedByShortDocuments(tiny_models.Bag):
    """As BigBird does: a short document removes what long ones need."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: nn.Module | None = nn.Identity()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        if input_ids.shape[1] > 20:
            assert self.blocks is not None
            return self.head(self.blocks(x).mean(1))
        self.blocks = None
        return self.head(x.sum(1))


def at_most_twenty(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    assert input_ids.shape[1] <= 20
    return m.embedding(input_ids).sum(1)


@pytest.mark.parametrize(
    "factory", [partial(tiny_models.Computed, values_of_long_documents), ChangedByShortDocuments]
)
def test_branch_of_the_model_is_no_limit(factory: Callable[[], nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"branch at 20 tokens.*--max-length 20\."):
        capture(factory())
    assert input_spec(capture(factory(), max_tokens=20)).max_tokens == 20


def test_length_that_the_model_asserts_is_its_limit() -> None:
    assert input_spec(capture(tiny_models.Computed(at_most_twenty))).max_tokens == 20


def windows(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    x = m.embedding(input_ids)
    count = (x.shape[1] + 15) // 16
    x = nn.functional.pad(x, (0, 0, 0, count * 16 - x.shape[1])).unflatten(1, (count, 16))
    return x.mean(2).mean(1)


def first_window(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    return m.embedding(input_ids)[:, :16].sum(1)


def every_second(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    return m.embedding(input_ids)[:, ::2].sum(1)


def window_attention(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    """The example of docs/how-to/export-your-model.md."""
    x = m.embedding(input_ids)
    count = -(-x.shape[1] // 16)
    x = nn.functional.pad(x, (0, 0, 0, count * 16 - x.shape[1])).unflatten(1, (count, 16))
    x = (x @ x.transpose(2, 3)).softmax(-1) @ x
    return x.mean(2).mean(1)


def scaled(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    """By functions of the number of tokens that ask for a Python float."""
    tokens = input_ids.shape[1]
    x = m.embedding(input_ids) / math.sqrt(tokens) * math.log(tokens + 1, 512)
    return x.sum(1) * math.exp(-tokens)


def fractions(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    """100 * 0.29 is less than 29 in float64, and is 29 in float32."""
    tokens = input_ids.shape[1]
    x = m.embedding(input_ids) / float(tokens)
    some = x.topk(min(8, tokens), dim=1).values.sum(1) + x[:, : round(tokens * 0.7)].sum(1)
    return x[:, : int(tokens * 0.29)].sum(1) + some + x[:, : len(input_ids)].sum(1)


def cropped_windows(m: tiny_models.Bag, input_ids: Tensor) -> Tensor:
    x = m.embedding(input_ids)
    count = math.ceil(x.shape[1] / 16)
    y = nn.functional.pad(x, (0, 0, 0, count * 16 - x.shape[1])).unflatten(1, (count, 16))
    y = (y - y.mean(2, keepdim=True)).flatten(1, 2)
    return (x + y[:, : x.shape[1]]).sum(1)


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize(
    "compute",
    [windows, window_attention, first_window, every_second, scaled, fractions, cropped_windows],
)
def test_single_element_of_short_document_generalizes(compute: Callable[..., Tensor]) -> None:
    """A size that is 1 for a short document is captured for every length."""
    module = tiny_models.Computed(compute).eval()
    program = capture(module)
    assert input_spec(program).max_tokens is None
    engine = OnnxRuntimeEngine(finish(lower(program)).SerializeToString())
    for tokens in (1, 2, 15, 16, 17, 100):
        ids = torch.randint(300, (2, tokens))
        expected = module(ids).detach()
        torch.testing.assert_close(program.module()(ids), expected)
        logits = engine.run({"input_ids": ids.numpy()})["logits"]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 2, 3, 32])
def test_limit_holds_for_every_shorter_length(limit: int) -> None:
    program = capture(tiny_models.Positions(), max_tokens=limit)
    assert input_spec(program).max_tokens == limit
    engine = OnnxRuntimeEngine(finish(lower(program)).SerializeToString())
    for tokens in {1, (limit + 1) // 2, limit}:
        ids = np.full((1, tokens), 7)
        with torch.inference_mode():
            expected = tiny_models.Positions().eval()(torch.from_numpy(ids)).shape
        assert engine.run({"input_ids": ids})["logits"].shape == expected
