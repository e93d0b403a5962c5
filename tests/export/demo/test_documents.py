from itertools import pairwise

from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import tokenized
from aftexport.demo.tokenizer import train_tokenizer

TEXT = "def f(x):\n    return \N{SNOWMAN} + 'zwei Vertr\N{LATIN SMALL LETTER A WITH DIAERESIS}ge'\n"


def test_starts_are_bytes_of_tokens() -> None:
    """The bytes from each start to the next are those of the token."""
    tokenizer = train_tokenizer([TEXT * 20], 300)
    (document,) = tokenized(tokenizer, Corpus((TEXT,), ("a",)))
    assert len(document) == len(document.ids) < len(TEXT.encode())
    places = [*document.starts.tolist(), len(TEXT.encode())]
    pieces = [TEXT.encode()[start:stop] for start, stop in pairwise(places)]
    alone = [tokenizer.decode([token]) for token in document.ids]
    assert [piece.decode(errors="replace") for piece in pieces] == alone


def test_token_at_place_contains_it() -> None:
    tokenizer = train_tokenizer(["-"], 256)  # a token for each byte
    (document,) = tokenized(tokenizer, Corpus(("a\N{SNOWMAN}b",), ("a",)))
    assert document.tokens_at([0, 1, 3, 4]).tolist() == [0, 1, 3, 4]
    merged = train_tokenizer(["return return return"], 260)
    (document,) = tokenized(merged, Corpus((" return x",), ("a",)))
    assert document.starts.tolist() == sorted(document.starts.tolist())
    places = range(len(" return x"))
    tokens = document.tokens_at(places).tolist()
    ends = [*document.starts[1:].tolist(), len(" return x")]
    assert all(document.starts[t] <= p < ends[t] for p, t in zip(places, tokens, strict=True))


def test_excerpt_is_text_of_tokens() -> None:
    (document,) = tokenized(train_tokenizer(["-"], 256), Corpus(("a\N{SNOWMAN}b",), ("a",)))
    assert document.excerpt(1, 4) == "\N{SNOWMAN}"
    assert document.excerpt(0, 5) == document.text
    assert document.excerpt(1, 3) == "\ufffd"  # half of a character
