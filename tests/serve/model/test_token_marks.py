"""The words and characters of tokens are those of transformers."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.pipelines.token_classification import (
    AggregationStrategy,
    TokenClassificationPipeline,
)

from aftexport.bundle.tokenizer import byte_tokenizer
from aftexport.heads import TokenClassification
from aftserve.model.documents import TokenAnswers
from aftserve.model.token_marks import TokenMarker, TokenMarks

LABELS = ("O", "B-name", "I-name", "B-date", "I-date")
TEXTS = [
    "Ada Lovelace paid 😀 on 3 May.",
    "A cafe\u0301 by Zoe\u0308, 👩\u200d💻 and  two   spaces",
    "unknownword",
    " ",
    "Ada",
]
PIECES = ("ada", "love", "##lace", "paid", "on", "3", "may", ".", "a", "ca", "##fe", "by", "zoe")


def word_piece() -> Tokenizer:
    """A tokenizer whose later parts of words have a prefix; it adds a token at both ends."""
    names = ["[UNK]", "[CLS]", "[SEP]", *PIECES, "😀", ",", "and", "two", "spa", "##ces"]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """A tokenizer of parts of words without a prefix, with a token for unknown characters."""
    names = ["[UNK]", "\u2581", "\u2581Ada", "a", "d", "\u2581on", "\u25813", "ay", ".", "\u2581M"]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


TOKENIZERS = {"word pieces": word_piece, "bytes": byte_tokenizer, "unigram": unigram}


def marks_of(tokenizer: Tokenizer, text: str) -> tuple[TokenMarks, list[int]]:
    encoding = tokenizer.encode_batch([text])[0]
    return TokenMarker(tokenizer, with_words=True).marks(text, encoding), encoding.ids


def pre_entities(tokenizer: Tokenizer, text: str, scores: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return the pipeline of transformers, and the tokens that it reads."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    pipeline = object.__new__(TokenClassificationPipeline)
    pipeline.tokenizer = wrapped
    pipeline.model = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate(LABELS))))
    read = wrapped(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    found = pipeline.gather_pre_entities(
        text,
        np.array(read["input_ids"]),
        scores,
        read["offset_mapping"],
        np.array(read["special_tokens_mask"]),
        AggregationStrategy.FIRST,
    )
    return pipeline, found


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Iterator[Tokenizer]:
    return TOKENIZERS[request.param]()


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("text", TEXTS)
def test_marks_are_those_of_transformers(tokenizer: Tokenizer, text: str) -> None:
    marks, ids = marks_of(tokenizer, text)
    _, expected = pre_entities(tokenizer, text, np.zeros((len(ids), len(LABELS))))
    assert marks.starts_word is not None
    own = np.flatnonzero(~marks.is_special)
    assert own.tolist() == [one["index"] for one in expected]
    assert marks.characters[own].tolist() == [[one["start"], one["end"]] for one in expected]
    assert marks.starts_word[own].tolist() == [not one["is_subword"] for one in expected]
    assert not marks.characters[marks.is_special].any()


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("aggregation", ["simple", "first", "average", "max"])
@pytest.mark.parametrize("text", TEXTS)
def test_spans_are_those_of_pipeline(tokenizer: Tokenizer, text: str, aggregation: Any) -> None:
    marks, ids = marks_of(tokenizer, text)
    head = TokenClassification(labels=LABELS, aggregation=aggregation)
    logits = np.random.default_rng(len(text)).normal(0, 3, (len(ids), len(LABELS)))
    decoding = marks.decoding
    decoder = head.decoder(decoding.starts_word, is_special=decoding.is_special)
    decoder.add(logits)
    answers = TokenAnswers({"tags": head}, {"tags": decoder.finish()}, 0, text, marks.characters)
    spans = list(answers.all_spans("tags"))
    pipeline, tokens = pre_entities(tokenizer, text, head.scores(logits))
    groups = pipeline.aggregate(tokens, AggregationStrategy(aggregation))
    expected = [group for group in groups if group["entity_group"] != "O"]
    assert [(span.label, span.start, span.end) for span in spans] == [
        (group["entity_group"], group["start"], group["end"]) for group in expected
    ]
    assert [span.text for span in spans] == [text[g["start"] : g["end"]] for g in expected]
    assert [span.score for span in spans] == pytest.approx([g["score"] for g in expected], rel=1e-6)


def test_part_keeps_characters_of_text() -> None:
    marks, ids = marks_of(word_piece(), TEXTS[0])
    part = marks.part(2, len(ids))
    assert part.characters.tolist() == marks.characters[2:].tolist()
    assert part.starts_word is not None
    assert len(part.starts_word) == len(part.is_special) == len(ids) - 2


def test_no_words_are_made_unless_needed() -> None:
    tokenizer = byte_tokenizer()
    (encoding,) = tokenizer.encode_batch(["a b"])
    marks = TokenMarker(tokenizer, with_words=False).marks("a b", encoding)
    assert marks.decoding.starts_word is None
    assert marks.decoding.is_special is None
