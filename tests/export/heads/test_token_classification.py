"""Labels and spans of tokens are those of transformers and of the rules of their schemes."""

import itertools
import json
import re
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import TypeAdapter, ValidationError
from transformers.pipelines.token_classification import (
    AggregationStrategy,
    TokenClassificationPipeline,
)

from aftexport.errors import InputError, UsageError
from aftexport.heads import AnyHead, TokenClassification
from aftexport.heads.token_classification import TokenLabels

BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
BIOES = ("O", *(f"{place}-{kind}" for kind in "XY" for place in "BIES"))
AGGREGATIONS = ("none", "simple", "first", "average", "max")
Found = tuple[str, int, int, float]
LOGITS = st.integers(-40, 40).map(lambda number: number / 8)
RAGGED = st.integers(0, 30).flatmap(
    lambda tokens: st.tuples(
        arrays(np.float64, (tokens, len(BIO)), elements=LOGITS),
        arrays(np.bool_, tokens),
        st.lists(st.integers(0, tokens), max_size=4),
    )
)
"""Logits of tokens, whether each starts a word, and cuts between blocks."""


def head_of(labels: Sequence[str], **settings: Any) -> TokenClassification:
    content = {"task": "token_classification", "labels": labels, **settings}
    adapter: TypeAdapter[TokenClassification] = TypeAdapter(AnyHead)
    return adapter.validate_json(json.dumps(content))


def decode(
    head: TokenClassification,
    logits: Any,
    words: Any = None,
    *,
    special: Any = None,
    cuts: Sequence[int] = (),
) -> TokenLabels:
    """Decode logits in blocks."""
    decoder = head.decoder(words, is_special=special)
    for block in np.split(logits, sorted(cuts)):
        decoder.add(block)
    result = decoder.finish()
    assert isinstance(result, TokenLabels)
    return result


def spans_of(result: TokenLabels) -> list[Found]:
    spans = result.answer().spans
    return [(span.label, span.start_token, span.end_token, span.score) for span in spans]


def logits_of(labels: Sequence[str], names: Sequence[str]) -> Any:
    """Return logits that choose these labels."""
    return np.array([[4.0 * (name == label) for name in names] for label in labels]).reshape(
        -1, len(names)
    )


def pipeline_entities(
    head: TokenClassification, logits: Any, words: Any, aggregation: str
) -> list[dict[str, Any]]:
    """Return the entities that the pipeline of transformers makes of the same scores."""
    pipeline = object.__new__(TokenClassificationPipeline)
    pipeline.model = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate(head.labels))))
    pipeline.tokenizer = SimpleNamespace(convert_tokens_to_string="".join)
    tokens = [
        {
            "word": "w",
            "scores": scores,
            "start": place,
            "end": place + 1,
            "index": place,
            "is_subword": not words[place],
        }
        for place, scores in enumerate(head.scores(logits))
    ]
    entities = pipeline.aggregate(tokens, AggregationStrategy(aggregation))
    return [one for one in entities if "O" not in (one.get("entity"), one.get("entity_group"))]


@pytest.mark.parametrize("aggregation", AGGREGATIONS[1:])
@settings(deadline=None)
@given(RAGGED)
def test_spans_are_those_of_transformers(aggregation: str, drawn: Any) -> None:
    logits, words, cuts = drawn
    head = head_of(BIO, aggregation=aggregation)
    if aggregation == "average":
        assume(not has_tie_of_means(head.scores(logits), words))
    expected = pipeline_entities(head, logits, words, aggregation)
    found = spans_of(decode(head, logits, words, cuts=cuts))
    assert [one[:3] for one in found] == [
        (one["entity_group"], one["start"], one["end"]) for one in expected
    ]
    np.testing.assert_allclose(
        [one[3] for one in found], [one["score"] for one in expected], rtol=1e-6
    )


def has_tie_of_means(scores: Any, words: Any) -> bool:
    """Return whether rounding decides on the label of a word."""
    for word in np.split(scores, np.flatnonzero(words)):
        if len(word):
            largest = np.sort(word.mean(0))[-2:]
            if largest[1] - largest[0] < 1e-9:
                return True
    return False


@settings(deadline=None)
@given(RAGGED)
def test_labels_are_those_of_transformers(drawn: Any) -> None:
    logits, words, cuts = drawn
    head = head_of(BIO, aggregation="none")
    expected = pipeline_entities(head, logits, words, "none")
    answer = decode(head, logits, cuts=cuts).answer()
    found = zip(itertools.count(), answer.labels, answer.scores, strict=False)
    entities = [one for one in found if one[1] != "O"]
    assert [one[:2] for one in entities] == [(one["index"], one["entity"]) for one in expected]
    np.testing.assert_allclose(
        [one[2] for one in entities], [one["score"] for one in expected], rtol=1e-6
    )
    assert answer.spans == ()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("labels", [BIO, BIOES[:5], ("O", "a", "b", "c", "d")], ids=str)
@settings(deadline=None, max_examples=30)
@given(RAGGED)
def test_blocks_do_not_matter(labels: Sequence[str], aggregation: str, drawn: Any) -> None:
    logits, words, cuts = drawn
    head = head_of(labels, aggregation=aggregation)
    special = np.roll(words, 1)
    whole = decode(head, logits, words, special=special)
    parts = decode(head, logits, words, special=special, cuts=cuts)
    rows = decode(head, logits, words, special=special, cuts=range(len(logits)))
    assert whole.answer() == parts.answer() == rows.answer()
    assert whole.labels.dtype == np.uint8


@pytest.mark.parametrize("length", range(1, 6))
def test_bioes_spans_are_strict(length: int) -> None:
    """A regular expression finds the same spans in every sequence of up to 5 labels.

    The sequences are parts of one document. A special token ends each of them.
    """
    head = head_of(BIOES)
    assert head.scheme == "bioes"
    shown = dict(zip(BIOES, ("OO", "bX", "iX", "eX", "sX", "bY", "iY", "eY", "sY"), strict=True))
    texts, numbers = [], []
    for labels in itertools.product(range(len(BIOES)), repeat=length):
        texts.append("".join(shown[BIOES[number]] for number in labels) + "||")
        numbers.append([*labels, labels[0]])
    matches = re.finditer(r"sX|sY|bX(?:iX)*eX|bY(?:iY)*eY", "".join(texts))
    expected = [(match[0][1], match.start() // 2, match.end() // 2) for match in matches]
    special = np.arange(len(numbers) * (length + 1)) % (length + 1) == length
    result = decode(head, np.eye(len(BIOES))[np.ravel(numbers)], special=special)
    assert [one[:3] for one in spans_of(result)] == expected
    assert len(expected) >= 2 * len(BIOES) ** (length - 1)


def test_bilou_spans_are_those_of_bioes() -> None:
    bilou = tuple(label.translate(str.maketrans("ES", "LU")) for label in BIOES)
    head = head_of(bilou)
    assert head.scheme == "bioes"
    labels = ["O", "B-X", "I-X", "L-X", "U-Y", "B-Y", "L-X"]
    found = spans_of(decode(head, logits_of(labels, bilou)))
    assert [one[:3] for one in found] == [("X", 1, 4), ("Y", 4, 5)]


@pytest.mark.parametrize(
    ("labels", "scheme"),
    [
        (BIO, "bio"),
        (("O", "I-PER", "I-LOC"), "bio"),
        (BIOES, "bioes"),
        (("O", "B-X", "L-X", "U-X"), "bioes"),
        (("O", "B-X", "E-X", "U-X"), "plain"),
        (("O", "PER", "LOC"), "plain"),
        (("O", "B-PER", "I-PER", "X"), "plain"),
        (("B-", "I-"), "plain"),
        (("O", "o"), "plain"),
    ],
    ids=str,
)
def test_names_declare_their_scheme(labels: Sequence[str], scheme: str) -> None:
    assert TokenClassification.of_width(len(labels), labels).scheme == scheme
    assert head_of(labels).scheme == scheme
    assert head_of(labels, scheme="plain").scheme == "plain"


def test_plain_spans_are_runs_of_labels() -> None:
    names = ("O", "NOUN", "B-VERB")
    head = head_of(names)
    labels = ["NOUN", "NOUN", "O", "NOUN", "B-VERB", "B-VERB"]
    found = spans_of(decode(head, logits_of(labels, names)))
    assert [one[:3] for one in found] == [("NOUN", 0, 2), ("NOUN", 3, 4), ("B-VERB", 4, 6)]


def test_special_tokens_end_spans() -> None:
    head = head_of(BIO)
    labels = ["B-PER", "I-PER", "I-PER", "I-PER"]
    special = np.array([True, False, True, False])
    result = decode(head, logits_of(labels, BIO), special=special)
    assert [one[:3] for one in spans_of(result)] == [("PER", 1, 2), ("PER", 3, 4)]
    assert result.answer().labels == tuple(labels)
    words = np.zeros(4, bool)
    averaged = head_of(BIO, aggregation="average")
    result = decode(averaged, logits_of(labels, BIO), words, special=special)
    assert [one[:3] for one in spans_of(result)] == [("PER", 1, 2), ("PER", 3, 4)]


def test_part_has_spans_starting_inside() -> None:
    labels = ["B-PER", "I-PER", "O", "B-LOC", "I-LOC", "I-LOC"]
    result = decode(head_of(BIO), logits_of(labels, BIO))
    parts = [result.answer(0, 1), result.answer(1, 4), result.answer(4)]
    assert [len(part.labels) for part in parts] == [1, 3, 2]
    assert [[span.end_token for span in part.spans] for part in parts] == [[2], [6], []]
    whole = result.answer()
    assert sum((part.spans for part in parts), ()) == whole.spans
    assert sum((part.scores for part in parts), ()) == whole.scores


@pytest.mark.parametrize("tokens", [0, 200_000])
def test_files_keep_values_of_tokens(tokens: int) -> None:
    """The files are mapped, and give the same answer as memory."""
    logits = np.random.default_rng(0).normal(size=(tokens, len(BIO))).astype(np.float32)
    head, results = head_of(BIO), []
    for open_file in (None, tempfile.TemporaryFile):
        decoder = head.decoder(open_file=open_file)  # type: ignore[arg-type]
        decoder.add(logits)
        results.append(cast(TokenLabels, decoder.finish()))
    in_memory, in_files = results
    assert isinstance(in_files.labels.base, np.memmap) == (tokens > 0)
    assert len(in_memory.spans) == len(in_files.spans)
    assert in_memory.answer() == in_files.answer()


def test_words_need_a_text() -> None:
    head = head_of(BIO, aggregation="first")
    assert head.needs_words
    with pytest.raises(InputError, match=r"words of aggregation 'first', got token ids"):
        head.decoder()
    assert not head_of(BIO).needs_words


def test_rows_must_fit() -> None:
    with pytest.raises(ValueError, match=r"rows \[n, 5\], got shape \[2, 4\]"):
        head_of(BIO).decoder().add(np.zeros((2, 4)))
    with pytest.raises(ValueError, match="mask of 2 tokens or more, got 1"):
        head_of(BIO, aggregation="max").decoder(np.array([True])).add(np.zeros((2, 5)))


def test_impossible_heads_are_refused() -> None:
    with pytest.raises(UsageError, match=r"at least 2 labels of tokens, got 1"):
        TokenClassification.of_width(1, None)
    with pytest.raises(ValidationError, match="in bioes, got 'PER'"):
        head_of(("O", "PER"), scheme="bioes")
    with pytest.raises(ValidationError, match="one of them twice"):
        head_of(("O", "O"))
    with pytest.raises(ValidationError, match="labels"):
        head_of(("O",))


def test_flips_are_tokens_with_other_labels() -> None:
    head = head_of(BIO)
    expected = np.eye(5)[None, [0, 1, 2]] * 3
    output = expected.copy()
    output[0, 2, 4] = 5.0
    assert head.flips(output, expected) == (1, -2.0)
    assert head.flips(expected, expected) == (0, 3.0)
    assert head.score_error(output, expected) > 0.5
    nothing = np.zeros((1, 0, 5))
    assert (head.flips(nothing, nothing), head.score_error(nothing, nothing)) == ((0, None), 0.0)
