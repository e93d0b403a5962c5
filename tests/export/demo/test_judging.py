import numpy as np
import pytest

from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import Document, tokenized, train_tokenizer
from aftexport.demo.judging import accuracies, byte_frequencies, byte_regression, hold_out
from aftexport.errors import UsageError

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
    table = accuracies(train, hold_out(DOCUMENTS, 100), ["short", "long", "long"], "model")
    assert table.columns[1].header == "accuracy, 3 held-out documents"
    assert [*table.columns[1].cells][::2] == ["66.7%", "66.7%"]
