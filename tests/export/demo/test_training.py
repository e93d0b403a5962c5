import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from clocks import replace_time
from torch import Tensor

from aftexport.demo import training
from aftexport.demo.documents import Document, Example
from aftexport.demo.training import Crops, build, fit, predict
from aftexport.nn import AftLocal, ClassifierConfig

CONFIG = ClassifierConfig(
    mechanism="aft_local", vocab_size=30, num_labels=3, dim=16, depth=1, ffn_dim=16, window=4
)


class Whole:
    """A target that holds for each part of a document."""

    def __init__(self, value: Sequence[float] | int) -> None:
        self.value = torch.tensor(value)

    def part(self, start: int, stop: int) -> Tensor:
        return self.value


def documents(count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Return random tokens, one in ten of them the class."""
    draw = random.Random(seed)
    targets = [draw.randrange(3) for _ in range(count)]
    texts = [
        [t if draw.random() < 0.1 else draw.randrange(3, 30) for _ in range(draw.randrange(30, 90))]
        for t in targets
    ]
    return texts, targets


def examples(count: int, seed: int) -> list[Example]:
    return [Example(ids, Whole(t)) for ids, t in zip(*documents(count, seed), strict=True)]


def unseen(texts: list[list[int]]) -> list[Document]:
    return [Document("", "", ids, np.arange(len(ids))) for ids in texts]


def test_recurrent_layers_get_shorter_crops() -> None:
    assert Crops(16, 512, 1025).for_layer("mamba2") == Crops(16, 128, 257)
    assert Crops(16, 512, 1025).for_layer("aft_conv") == Crops(16, 512, 1025)


def test_training_beats_chance_on_unseen_documents() -> None:
    model = build(CONFIG, seed=0)
    fit(model, examples(150, seed=1), seed=0, steps=80)
    texts, targets = documents(60, seed=2)
    outputs = predict(model, unseen(texts))
    assert sum(int(o.argmax()) == t for o, t in zip(outputs, targets, strict=True)) > 54


def shares(ids: list[int]) -> list[float]:
    return [ids.count(t) / len(ids) * 10 for t in range(3)]


def test_training_fits_task_of_model() -> None:
    """The targets of a regression are values, and its outputs come close to them."""
    model = build(replace(CONFIG, problem_type="regression"), seed=0)
    texts, _ = documents(150, seed=1)
    fit(model, [Example(ids, Whole(shares(ids))) for ids in texts], seed=0, steps=80)
    texts, _ = documents(60, seed=2)
    errors = np.stack(predict(model, unseen(texts))) - np.array([shares(ids) for ids in texts])
    deviation = np.array([shares(ids) for ids in texts]).std(0)
    assert (np.abs(errors).mean(0) < deviation / 2).all()


def test_targets_are_those_of_crops() -> None:
    """Each crop of a long document asks for the target of its own part."""
    asked: list[tuple[int, int]] = []

    class Recorder(Whole):
        def part(self, start: int, stop: int) -> Tensor:
            asked.append((start, stop))
            return self.value

    length = 300
    long = Example([5] * length, Recorder(1))
    fit(build(CONFIG, seed=0), [long], seed=0, crops=Crops(4, 50, 100), steps=6)
    assert len(asked) == 6
    assert len(set(asked)) == 6
    assert all(0 <= start <= stop - 50 <= length for start, stop in asked)
    assert all(stop - start <= 100 for start, stop in asked)


def test_seed_determines_weights() -> None:
    weights = []
    for seed in (0, 0, 1):
        model = build(CONFIG, seed=seed)
        fit(model, examples(40, seed=1), seed=seed, steps=5)
        weights.append(model.head.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_building_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    build(CONFIG, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_reports_stop_after_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes a hundredth of a second by the clock of the test."""
    clock = (number / 100 for number in itertools.count())
    replace_time(monkeypatch, training, monotonic=lambda: next(clock))
    model = build(CONFIG, seed=0)
    result = fit(model, examples(20, seed=1), seed=0, steps=10_000, max_seconds=0.5)
    assert result.was_cut_short
    assert 0 < result.steps < 10_000
    assert result.seconds == pytest.approx(0.5, abs=0.05)


def test_progress_rises_to_one() -> None:
    reports: list[tuple[float, float]] = []
    model = build(CONFIG, seed=0)
    result = fit(
        model, examples(20, seed=1), seed=0, steps=4, report=lambda *both: reports.append(both)
    )
    assert [progress for progress, _ in reports] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert (result.steps, result.was_cut_short) == (4, False)
    assert not model.training


@pytest.mark.parametrize("max_length", [None, 64])
def test_token_models_begin_near_each_token(max_length: int | None) -> None:
    """The biases of a distance fall with it; a table of pairs stays as it is."""
    config = replace(CONFIG, problem_type="token_classification", depth=2, max_length=max_length)
    first, second = (
        layer.band().detach()[0] for layer in build(config, seed=0).modules()
        if isinstance(layer, AftLocal)
    )  # fmt: skip
    if max_length is not None:
        assert max(first.abs().max(), second.abs().max()) < 1
        return
    middle = len(first) // 2
    for band in (first, second):
        assert (band[: middle + 1].diff() > 0).all()
        assert torch.equal(band, band.flip(0))
    assert second[0] > first[0]
