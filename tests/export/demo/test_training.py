import itertools
import random

import numpy as np
import pytest
import torch
from clocks import replace_time

from aftexport.demo import training
from aftexport.demo.corpus import Corpus, Document, tokenized, train_tokenizer
from aftexport.demo.training import (
    Crops,
    accuracies,
    build,
    byte_frequencies,
    byte_regression,
    fit,
    hold_out,
    predict,
)
from aftexport.errors import UsageError
from aftexport.nn import ClassifierConfig

CONFIG = ClassifierConfig(
    mechanism="aft_local", vocab_size=30, num_labels=3, dim=16, depth=1, ffn_dim=16, window=4
)


LABELS = ("zero", "one", "two")


def documents(count: int, seed: int) -> list[Document]:
    """Return random tokens, one in ten of them the number of the label."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        target, tokens = draw.randrange(3), draw.randrange(30, 90)
        ids = [target if draw.random() < 0.1 else draw.randrange(3, 30) for _ in range(tokens)]
        found.append(Document("", LABELS[target], ids))
    return found


def test_recurrent_layers_get_shorter_crops() -> None:
    assert Crops(16, 512, 1025).for_layer("mamba2") == Crops(16, 128, 257)
    assert Crops(16, 512, 1025).for_layer("aft_conv") == Crops(16, 512, 1025)


def test_training_beats_chance_on_unseen_documents() -> None:
    model = build(CONFIG, seed=0)
    fit(model, documents(150, seed=1), LABELS, seed=0, steps=80)
    unseen = documents(60, seed=2)
    answers = predict(model, unseen, LABELS)
    assert sum(a == one.label for a, one in zip(answers, unseen, strict=True)) > 54


def test_crops_are_parts_of_documents() -> None:
    """Each step takes another part of a long document, of a length within the bounds."""
    seen = list[list[int]]()
    model = build(CONFIG, seed=0)
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0][0].tolist()))
    long = [Document("", "one", [place % 30 for place in range(300)])]
    fit(model, long, LABELS, seed=0, crops=Crops(4, 50, 100), steps=6)
    assert len(seen) == 6
    assert len({tuple(crop) for crop in seen}) > 1
    for crop in seen:
        assert 50 <= len(crop) <= 100
        assert crop == [(crop[0] + place) % 30 for place in range(len(crop))]


def test_seed_determines_weights() -> None:
    weights = []
    for seed in (0, 0, 1):
        model = build(CONFIG, seed=seed)
        fit(model, documents(40, seed=1), LABELS, seed=seed, steps=5)
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
    result = fit(model, documents(20, seed=1), LABELS, seed=0, steps=10_000, max_seconds=0.5)
    assert result.was_cut_short
    assert 0 < result.steps < 10_000
    assert result.seconds == pytest.approx(0.5, abs=0.05)


def test_progress_rises_to_one() -> None:
    reports: list[tuple[float, float]] = []
    model = build(CONFIG, seed=0)
    result = fit(
        model,
        documents(20, seed=1),
        LABELS,
        seed=0,
        steps=4,
        report=lambda *both: reports.append(both),
    )
    assert [progress for progress, _ in reports] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert (result.steps, result.was_cut_short) == (4, False)
    assert not model.training


BYTES = train_tokenizer(["-"], 256)
DOCUMENTS = tokenized(BYTES, Corpus(("xyz", "a" * 9, "xyzxyz"), ("short", "long", "short")))
LETTERS = [
    Document(f"{letter * n}{'-' * (30 - n)}", letter, []) for letter in "ab" for n in range(5, 15)
]


def test_documents_over_limit_are_counted() -> None:
    held_out = hold_out(DOCUMENTS, 6)
    assert [document.text for document in held_out.documents] == ["xyz", "xyzxyz"]
    assert held_out.left_out == 1
    assert held_out.longest.text == "xyzxyz"


def test_no_document_within_limit_fails() -> None:
    with pytest.raises(UsageError, match="at most 2 tokens"):
        hold_out(DOCUMENTS, 2)


def test_byte_frequencies_count_bytes_of_utf8() -> None:
    texts = ("aab", "\N{SNOWMAN}")
    frequencies = byte_frequencies([Document(text, "", []) for text in texts])
    assert frequencies.shape == (2, 256)
    assert frequencies[0, ord("a")] == pytest.approx(2 / 3)
    np.testing.assert_allclose(frequencies.sum(1), 1)


def test_byte_regression_separates_texts_by_bytes() -> None:
    asked = [Document("aaa---", "", []), Document("-bbb-", "", [])]
    assert byte_regression(LETTERS, asked) == ["a", "b"]


def test_accuracies_stand_beside_baselines() -> None:
    train = tokenized(BYTES, Corpus(("ab", "ba", "ccc"), ("short", "short", "long")))
    answers = {"model": ["short", "long", "long"], "first": ["long", "long", "long"]}
    table = accuracies(train, hold_out(DOCUMENTS, 100), answers)
    assert table.columns[1].header == "accuracy, 3 held-out documents"
    assert [*table.columns[1].cells][::2] == ["66.7%", "66.7%"]
    assert [*table.columns[1].cells][-1] == "33.3%"
