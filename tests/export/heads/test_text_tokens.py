"""Words start where transformers starts them, and spans have the characters of their tokens."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.pipelines.token_classification import (
    AggregationStrategy,
    TokenClassificationPipeline,
)

from aftexport.heads import Span
from aftexport.heads.text_tokens import TextTokens, WordRule

TEXTS = st.text("ab. -é😀", max_size=20)
FAMILY = "👩‍👩‍👧"


def word_pieces() -> Tokenizer:
    pieces = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "ab", ".", "-", "é", "##a", "##b", "##é"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
    return tokenizer


def byte_pairs() -> Tokenizer:
    vocabulary = {c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"ab": 256, "Ġa": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def unigrams() -> Tokenizer:
    pieces = [("<unk>", -9.0), ("▁", -2.0), ("▁a", -1.0), ("a", -3.0), ("b", -3.0), ("ab", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


TOKENIZERS = {"word pieces": word_pieces, "byte pairs": byte_pairs, "unigrams": unigrams}


def tokens_of(tokenizer: Tokenizer, text: str) -> TextTokens:
    return TextTokens.of(text, tokenizer.encode(text), WordRule(tokenizer))


def pipeline_starts(tokenizer: Tokenizer, text: str) -> list[bool]:
    """Return whether each token that is not special starts a word in transformers."""
    encoding = tokenizer.encode(text)
    pipeline: Any = object.__new__(TokenClassificationPipeline)
    pipeline.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if tokenizer.token_to_id("[UNK]") is not None:
        pipeline.tokenizer.unk_token = "[UNK]"
    pipeline.model = SimpleNamespace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of a tokenizer without prefixes
        entities = pipeline.gather_pre_entities(
            text,
            np.array(encoding.ids),
            np.zeros((len(encoding.ids), 2)),
            np.array(encoding.offsets).reshape(-1, 2),
            np.array(encoding.special_tokens_mask),
            AggregationStrategy.FIRST,
        )
    return [not entity["is_subword"] for entity in entities]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(TEXTS)
def test_words_start_as_in_transformers(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokens_of(tokenizer, text)
    assert tokens.starts_word[~tokens.is_special].tolist() == pipeline_starts(tokenizer, text)


def test_words_end_at_any_white_space() -> None:
    tokens = tokens_of(byte_pairs(), "a\nb\u3000b.")
    starts = dict(zip(tokens.begins.tolist(), tokens.starts_word.tolist(), strict=True))
    assert starts == {0: True, 1: True, 2: True, 3: True, 4: True, 5: False}


def test_added_tokens_are_special() -> None:
    tokens = tokens_of(word_pieces(), "abé")
    assert tokens.is_special.tolist() == [True, False, False, True]
    assert tokens.starts_word.tolist() == [True, True, False, True]
    found = tokens.locate(Span(label="X", start_token=0, end_token=4, score=1.0))
    assert (found.start, found.end, found.text) == (0, 3, "abé")
    nothing = Span(label="X", start_token=3, end_token=4, score=1.0)
    assert tokens.locate(nothing) == nothing


@pytest.mark.parametrize("name", TOKENIZERS)
@given(TEXTS, st.data())
@settings(deadline=None)
def test_span_has_characters_of_its_tokens(name: str, text: str, data: st.DataObject) -> None:
    tokens = tokens_of(TOKENIZERS[name](), text)
    count = len(tokens.begins)
    if not count:
        return
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first, count - 1))
    found = tokens.locate(Span(label="X", start_token=first, end_token=last + 1, score=1.0))
    places = [
        (int(begin), int(end))
        for begin, end in zip(tokens.begins[first : last + 1], tokens.ends[first:], strict=False)
        if begin < end
    ]
    if not places:
        assert found.text is None
        return
    whole = text[places[0][0] : places[-1][1]]
    assert found.text == (whole.strip() or whole)
    assert text[found.start : found.end] == found.text


@pytest.mark.parametrize("part", ["😀", FAMILY, "e\u0301", "\u0928\u093f"])
def test_spans_keep_their_characters(part: str) -> None:
    """The tokens are single bytes, and several of them make a character."""
    text = f"a {part} b"
    tokens = tokens_of(byte_pairs(), text)
    first, end = 2, 2 + len(part.encode())
    found = tokens.locate(Span(label="X", start_token=first, end_token=end, score=1.0))
    assert (found.text, found.start, found.end) == (part, 2, 2 + len(part))
    piece = tokens.locate(Span(label="X", start_token=first + 1, end_token=first + 2, score=1.0))
    assert piece.text
    assert piece.text in part
