import pytest

from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import tokenized
from aftexport.demo.judging import hold_out
from aftexport.demo.tokenizer import train_tokenizer
from aftexport.errors import UsageError

TEST = Corpus(("xyz", "a" * 9, "xyzxyz"), ("short", "long", "short"))
DOCUMENTS = tokenized(train_tokenizer(["-"], 256), TEST)


def test_documents_over_limit_are_counted() -> None:
    held_out = hold_out(DOCUMENTS, 6)
    assert held_out.texts == ["xyz", "xyzxyz"]
    assert held_out.left_out == 1
    assert held_out.longest.text == "xyzxyz"


def test_no_document_within_limit_fails() -> None:
    with pytest.raises(UsageError, match="at most 2 tokens"):
        hold_out(DOCUMENTS, 2)
