import numpy as np
import pytest

from aftexport.demo.baseline import byte_frequencies, byte_regression, majority
from aftexport.demo.corpus import Corpus
from aftexport.demo.judging import hold_out
from aftexport.demo.tokenizer import train_tokenizer
from aftexport.errors import UsageError

TEST = Corpus(("xyz", "a" * 9, "xyzxyz"), ("short", "long", "short"))
TOKENIZER = train_tokenizer(["-"], 256)


def test_documents_over_limit_are_counted() -> None:
    held_out = hold_out(TEST, TOKENIZER, 6)
    assert held_out.corpus == TEST.take([0, 2])
    assert [len(ids) for ids in held_out.documents] == [3, 6]
    assert (held_out.left_out, held_out.longest) == (1, 1)


def test_no_document_within_limit_fails() -> None:
    with pytest.raises(UsageError, match="at most 2 tokens"):
        hold_out(TEST, TOKENIZER, 2)


def test_accuracy_is_share_of_right_answers() -> None:
    held_out = hold_out(TEST, TOKENIZER, 9)
    assert held_out.accuracy(["short", "long", "long"]) == pytest.approx(2 / 3)


def test_majority_baseline_answers_commonest_training_label() -> None:
    train = Corpus(("a", "b", "c"), ("rare", "common", "common"))
    assert majority(train, ["x", "y"]) == ["common", "common"]


def test_byte_frequencies_count_bytes_of_utf8() -> None:
    frequencies = byte_frequencies(["aab", "\N{SNOWMAN}"])
    assert frequencies.shape == (2, 256)
    assert frequencies[0, ord("a")] == pytest.approx(2 / 3)
    np.testing.assert_allclose(frequencies.sum(1), 1)


def test_byte_regression_separates_texts_by_bytes() -> None:
    texts = tuple(f"{letter * n}{'-' * (30 - n)}" for letter in "ab" for n in range(5, 15))
    train = Corpus(texts, ("a",) * 10 + ("b",) * 10)
    assert byte_regression(train, ["aaa---", "-bbb-"]) == ["a", "b"]
