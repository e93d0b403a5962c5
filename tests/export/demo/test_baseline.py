import numpy as np
import pytest

from aftexport.demo.baseline import (
    byte_frequencies,
    byte_labels,
    byte_regression,
    byte_values,
    majority,
)
from aftexport.demo.corpus import Corpus

TEXTS = tuple(f"{letter * n}{'-' * (30 - n)}" for letter in "ab" for n in range(5, 15))


def test_majority_baseline_answers_commonest_training_label() -> None:
    train = Corpus(("a", "b", "c"), ("rare", "common", "common"))
    assert majority(train, ["x", "y"]) == ["common", "common"]


def test_byte_frequencies_count_bytes_of_utf8() -> None:
    frequencies = byte_frequencies(["aab", "\N{SNOWMAN}"])
    assert frequencies.shape == (2, 256)
    assert frequencies[0, ord("a")] == pytest.approx(2 / 3)
    np.testing.assert_allclose(frequencies.sum(1), 1)


def test_byte_regression_separates_texts_by_bytes() -> None:
    train = Corpus(TEXTS, ("a",) * 10 + ("b",) * 10)
    assert byte_regression(train, ["aaa---", "-bbb-"]) == ["a", "b"]


def test_byte_labels_are_independent() -> None:
    """A label that holds for all or no training texts keeps that answer."""
    has_a = np.array(["a" in text for text in TEXTS])
    holds = np.stack([has_a, ~has_a, np.ones(20, bool), np.zeros(20, bool)], 1)
    answers = byte_labels(TEXTS, holds, ["aaa---", "-bbb-"])
    assert answers.tolist() == [[True, False, True, False], [False, True, True, False]]


def test_byte_values_follow_frequencies() -> None:
    shares = np.array([text.count("a") / 30 for text in TEXTS])
    values = byte_values(TEXTS, shares, ["a" * 12 + "-" * 18, "b" * 10 + "-" * 20])
    assert values == pytest.approx([0.4, 0.0], abs=0.1)  # the ridge shrinks
