import random

import pytest
import torch

from aftexport.demo.training import build, fit, predict
from aftexport.nn import ClassifierConfig

CONFIG = ClassifierConfig(
    mechanism="aft_local", vocab_size=30, num_labels=3, dim=16, depth=1, ffn_dim=16, window=4
)


def documents(count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Return random tokens, one in ten of them the class."""
    draw = random.Random(seed)
    targets = [draw.randrange(3) for _ in range(count)]
    texts = [
        [t if draw.random() < 0.1 else draw.randrange(3, 30) for _ in range(draw.randrange(30, 90))]
        for t in targets
    ]
    return texts, targets


def test_training_beats_chance_on_unseen_documents() -> None:
    model = build(CONFIG, seed=0)
    fit(model, *documents(150, seed=1), seed=0, steps=80)
    unseen, targets = documents(60, seed=2)
    answers = predict(model, unseen)
    assert sum(a == t for a, t in zip(answers, targets, strict=True)) > 54


def test_seed_determines_weights() -> None:
    weights = []
    for seed in (0, 0, 1):
        model = build(CONFIG, seed=seed)
        fit(model, *documents(40, seed=1), seed=seed, steps=5)
        weights.append(model.head.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_building_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    build(CONFIG, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_reports_stop_after_time_limit() -> None:
    model = build(CONFIG, seed=0)
    result = fit(model, *documents(20, seed=1), seed=0, steps=10_000, max_seconds=0.5)
    assert result.was_cut_short
    assert 0 < result.steps < 10_000
    assert result.seconds == pytest.approx(0.5, abs=0.5)


def test_progress_rises_to_one() -> None:
    reports: list[tuple[float, float]] = []
    model = build(CONFIG, seed=0)
    result = fit(
        model, *documents(20, seed=1), seed=0, steps=4, report=lambda *both: reports.append(both)
    )
    assert [progress for progress, _ in reports] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert (result.steps, result.was_cut_short) == (4, False)
    assert not model.training
