"""One label for every token: the scores are a softmax, and runs of tokens are spans.

The schemes BIO and BIOES of labels tell the spans, which are found block by block.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from annotated_types import Len
from numpy.typing import NDArray
from pydantic import Field, model_validator

from aftexport.errors import InputError, UsageError
from aftexport.heads.answer import Answer, Span, Spans, TokenNames, TokenNumbers
from aftexport.heads.head import Double, check_distinct, flips_of_largest, numbered, softmax
from aftexport.heads.token_head import Column, Decoder, Mask, OpenFile, TokenHead, TokenResult

Scheme = Literal["plain", "bio", "bioes"]
OUTSIDE = "O"
"""The label of tokens outside every span, in every scheme."""
_PREFIXED = re.compile(r"([BIESLU])-(.+)", re.DOTALL)
_SETS: tuple[tuple[Scheme, frozenset[str]], ...] = (
    ("bio", frozenset("BI")),
    ("bioes", frozenset("BIES")),
    ("bioes", frozenset("BILU")),
)
"""The prefixes of each scheme; L and U are other letters for E and S."""


class Place(IntEnum):
    """The place of a token in its span."""

    BEGIN = 0
    INSIDE = 1
    END = 2
    SINGLE = 3


_PLACES = {
    "B": Place.BEGIN,
    "I": Place.INSIDE,
    "E": Place.END,
    "L": Place.END,
    "S": Place.SINGLE,
    "U": Place.SINGLE,
}


def scheme_of(labels: Sequence[str]) -> Scheme:
    """Return the scheme that the names of labels declare."""
    # The scheme is bio or bioes if all names are O or have a prefix of that scheme.
    matches = [_PREFIXED.fullmatch(label) for label in labels if label != OUTSIDE]
    prefixes = {match[1] if match else "" for match in matches}
    found = (scheme for scheme, letters in _SETS if prefixes and prefixes <= letters)
    return next(found, "plain")


@dataclass(frozen=True)
class LabelTable:
    """The span of each label, in arrays by its number; -1 is a label outside every span."""

    spans: tuple[str, ...]  # the label of each kind of span
    kinds: NDArray[np.int64]  # the number of each label's kind of span; -1 outside
    places: NDArray[np.int64]  # the Place of each label

    @classmethod
    def read(cls, labels: Sequence[str], scheme: Scheme) -> Self:
        """Return the table of labels.

        Raises:
            ValueError: if a label does not follow bioes. In bio, a label without ``B-`` or ``I-``
                continues a span of its own name, as in the transformers library.
        """
        names: dict[str, int] = {}
        kinds, places = [], []
        for label in labels:
            name, place = label, Place.INSIDE
            match = None if scheme == "plain" else _PREFIXED.fullmatch(label)
            if match and (scheme == "bioes" or match[1] in "BI"):
                name, place = match[2], _PLACES[match[1]]
            elif scheme == "bioes" and label != OUTSIDE:
                raise ValueError(
                    f"labels: expected O, or names with B-, I-, E- and S-, in bioes, got {label!r}"
                )
            kinds.append(-1 if name == OUTSIDE else names.setdefault(name, len(names)))
            places.append(place)
        return cls(tuple(names), np.array([*kinds, -1]), np.array([*places, Place.INSIDE]))


UNIT = np.dtype([("label", "i8"), ("score", "f8"), ("start", "i8"), ("end", "i8")])
"""A token or a word: the number of its label, -1 outside; its score, and its range of tokens."""
FIXED_POINT = float(1 << 32)
"""Sums of scores are whole multiples of 1 / FIXED_POINT, so that their order does not matter."""
_RUN = np.dtype([(name, "i8") for name in ("first", "last", "start", "end", "total", "count")])
"""A run of units: its first and last label, its tokens, the sum of its scores, its units."""
_SPAN = np.dtype([("start", "u4"), ("end", "u4"), ("label", "u4"), ("score", "f4")])


@dataclass(frozen=True)
class TokenSpans:
    """The spans of a document in their order, in arrays with one entry for each."""

    starts: NDArray[np.uint32]
    ends: NDArray[np.uint32]  # the index of the token after the last
    labels: NDArray[np.uint32]  # the number of the label among the head's span_labels
    scores: NDArray[np.float32]  # the mean score of the tokens or words

    def __len__(self) -> int:
        return len(self.starts)


class SpanBuilder:
    """The spans of units that come in blocks."""

    # In plain and bio, a span is a run of units of one kind, and B- starts a new one. This is the
    # rule of the TokenClassificationPipeline of transformers. In bioes, a span is B-, any number of
    # I-, and E-, or it is one S-; other units are outside. This is the strict rule of seqeval.

    def __init__(self, table: LabelTable, scheme: Scheme, open_file: OpenFile | None) -> None:
        self._table, self._is_strict = table, scheme == "bioes"
        self._open = np.empty(0, _RUN)
        self._spans = Column(_SPAN, open_file=open_file)

    def add(self, units: NDArray[Any]) -> None:
        """Add units of type ``UNIT``."""
        runs = np.empty(len(self._open) + len(units), _RUN)
        new = runs[len(self._open) :]
        runs[: len(self._open)] = self._open
        new["first"] = new["last"] = units["label"]
        new["start"], new["end"], new["count"] = units["start"], units["end"], 1
        new["total"] = np.rint(units["score"] * FIXED_POINT)
        merged = self._merge(runs)
        self._open = merged[-1:]
        self._close(merged[:-1])

    def finish(self) -> TokenSpans:
        """Return the spans of all units."""
        self._close(self._open)
        spans = self._spans.array()
        return TokenSpans(spans["start"], spans["end"], spans["label"], spans["score"])

    def _merge(self, runs: NDArray[Any]) -> NDArray[Any]:
        """Return the runs, with each run joined to the one that it continues."""
        if not len(runs):
            return runs
        is_first = np.append(True, ~self._continues(runs["last"][:-1], runs["first"][1:]))
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(runs)) - 1
        merged = runs[firsts]
        merged["last"], merged["end"] = runs["last"][lasts], runs["end"][lasts]
        for sums in ("total", "count"):
            merged[sums] = np.add.reduceat(runs[sums], firsts)
        return merged

    def _continues(self, before: NDArray[np.int64], label: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether a unit with ``label`` is in the span of the unit before it."""
        kinds, places = self._table.kinds, self._table.places
        follows = places[label] != Place.BEGIN
        if self._is_strict:
            follows &= (places[label] != Place.SINGLE) & (places[before] < Place.END)
        return np.asarray((kinds[label] == kinds[before]) & (kinds[label] >= 0) & follows)

    def _close(self, runs: NDArray[Any]) -> None:
        """Keep those runs that are spans."""
        kinds = self._table.kinds[runs["first"]]
        is_span = kinds >= 0
        if self._is_strict:
            first, last = (self._table.places[runs[name]] for name in ("first", "last"))
            is_whole = (first == Place.BEGIN) & (last == Place.END)
            is_span &= is_whole | (first == Place.SINGLE)
        spans = np.empty(int(is_span.sum()), _SPAN)
        runs = runs[is_span]
        spans["start"], spans["end"], spans["label"] = runs["start"], runs["end"], kinds[is_span]
        spans["score"] = runs["total"] / (runs["count"] * FIXED_POINT)
        self._spans.add(spans)


WordRule = Literal["first", "average", "max"]
"""The label of a word: of its first token, by the mean of its scores, or of its surest token."""


class WordBuilder:
    """The words of tokens that come in blocks."""

    def __init__(self, rule: WordRule, width: int) -> None:
        self._rule = rule
        self._open = np.empty(0, UNIT)
        # For the rule average: sums of the scores of all labels, and numbers of tokens.
        self._sums = np.empty((0, width), np.int64)
        self._counts = np.empty(0, np.int64)

    def add(
        self, tokens: NDArray[Any], scores: Double | None, starts: NDArray[np.bool_]
    ) -> NDArray[Any]:
        """Add tokens of type ``UNIT``, and return the words that they complete.

        ``scores [n, width]`` of all labels are for the rule average; ``starts`` marks tokens that
        start a word.
        """
        tokens = np.concatenate([self._open, tokens])
        firsts = np.flatnonzero(np.append(np.ones(len(self._open), bool), starts))
        if not len(firsts) or firsts[0]:  # the first token of a document starts a word
            firsts = np.append(0, firsts)
        lasts = np.append(firsts[1:], len(tokens)) - 1
        words = tokens[firsts]
        if self._rule == "max":
            words = tokens[_largest(tokens["score"], firsts)]
        words["start"], words["end"] = tokens["start"][firsts], tokens["end"][lasts]
        if scores is not None:
            self._average(words, scores, firsts)
        self._open = words[-1:]
        return words[:-1]

    def finish(self) -> NDArray[Any]:
        """Return the last word, if there is one."""
        return self._open

    def _average(self, words: NDArray[Any], scores: Double, firsts: NDArray[np.int64]) -> None:
        """Set the label and the score of words by the mean of the scores of their tokens."""
        sums = np.concatenate([self._sums, np.rint(scores * FIXED_POINT).astype(np.int64)])
        sums = np.add.reduceat(sums, firsts)
        counts = np.append(self._counts, np.ones(len(scores), np.int64))
        counts = np.add.reduceat(counts, firsts)
        words["label"] = np.where(words["label"] < 0, -1, sums.argmax(1))
        words["score"] = sums.max(1) / (counts * FIXED_POINT)
        self._sums, self._counts = sums[-1:], counts[-1:]


def _largest(values: Double, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the first of the largest values in each segment."""
    segments = np.zeros(len(values), np.int64)
    segments[firsts[1:]] = 1
    segments = segments.cumsum()
    found = np.flatnonzero(values == np.maximum.reduceat(values, firsts)[segments])
    return found[np.flatnonzero(np.diff(segments[found], prepend=-1))]


Aggregation = Literal["none", "simple", "first", "average", "max"]


class TokenLabelsAnswer(Answer):
    """The labels of a document's tokens.

    Attributes:
        labels: for each token the label with the largest score.
        scores: for each token the probability of that label.
        spans: the spans that start at one of these tokens.
    """

    labels: TokenNames
    scores: TokenNumbers
    spans: Spans


class TokenClassification(TokenHead):
    """Labels of tokens that exclude each other.

    Attributes:
        labels: the names in the order of the logits.
        scheme: the meaning of prefixes: ``plain`` for none, ``bio`` for B- and I-, ``bioes`` for
            B-, I-, E- and S- (or L- and U-). By default that which all names follow.
        aggregation: the rule for spans, as ``aggregation_strategy`` of transformers: ``none`` for
            no spans, ``simple`` by the labels of tokens; by the labels of words, that of the
            ``first`` token, of the ``average`` scores, or of the token with the ``max`` score.
    """

    meaning: ClassVar[str] = "softmax over exclusive labels, for every token"
    answer_type: ClassVar[type[Answer]] = TokenLabelsAnswer

    task: Literal["token_classification"] = "token_classification"
    labels: Annotated[tuple[str, ...], Len(2)]
    scheme: Scheme = Field(default_factory=lambda given: scheme_of(given.get("labels", ())))
    aggregation: Aggregation = "simple"

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_distinct("labels", self.labels)
        LabelTable.read(self.labels, self.scheme)
        return self

    @classmethod
    def of_width(cls, width: int, names: Sequence[str] | None) -> Self:
        """Return a head for ``width`` labels, with the scheme of the names; see ``Head``."""
        if width < 2:
            raise UsageError(
                f"Expected logits for at least 2 labels of tokens, got {width}: a softmax over one "
                "label is always 1.0.",
                "Return a logit for each label, such as O and the label itself; or choose "
                "regression for one value of each token.",
            )
        return cls(labels=numbered(width, names, "class"))

    @property
    def names(self) -> tuple[str, ...]:
        """The labels."""
        return self.labels

    @cached_property
    def table(self) -> LabelTable:
        """The span of each label."""
        return LabelTable.read(self.labels, self.scheme)

    @property
    def span_labels(self) -> tuple[str, ...]:
        """The labels of spans: those of tokens without prefixes."""
        return self.table.spans

    @property
    def needs_words(self) -> bool:
        """Whether the aggregation is one of words."""
        return self.aggregation in ("first", "average", "max")

    def decoder(
        self,
        starts_word: Mask | None = None,
        *,
        is_special: Mask | None = None,
        open_file: OpenFile | None = None,
    ) -> Decoder:
        """Return a decoder of labels and spans; see ``TokenHead``."""
        if self.needs_words and starts_word is None:
            raise InputError(
                f"Expected a text for the words of aggregation {self.aggregation!r}, got token "
                "ids, which have no words.",
                "Send the text, or export the model with the aggregation 'simple'.",
            )
        return _LabelDecoder(self, starts_word, is_special, open_file)

    def scores(self, logits: Double) -> Double:
        """Return the softmax of the logits."""
        return softmax(logits)

    def flips(self, output: Double, expected: Double) -> tuple[int, float | None]:
        """Count tokens with another label, and measure the smallest lead of the expected label."""
        return flips_of_largest(output, expected)


@dataclass(frozen=True)
class TokenLabels(TokenResult):
    """The labels and spans of a document, in arrays."""

    head: TokenClassification
    labels: NDArray[np.unsignedinteger]  # the number of each token's label
    scores: NDArray[np.float32]  # the score of that label
    spans: TokenSpans

    def __len__(self) -> int:
        return len(self.labels)

    def answer(self, start: int = 0, end: int | None = None) -> TokenLabelsAnswer:
        """Return the answer for a part, with the spans that start in it; see ``TokenResult``."""
        end = len(self) if end is None else end
        names = self.head.labels
        first, last = np.searchsorted(self.spans.starts, [start, end]).tolist()
        return TokenLabelsAnswer(
            labels=tuple(names[number] for number in self.labels[start:end].tolist()),
            scores=tuple(self.scores[start:end].tolist()),
            spans=self.named_spans(first, last),
        )

    def named_spans(self, first: int = 0, last: int | None = None) -> tuple[Span, ...]:
        """Return the spans by their numbers; see ``TokenResult``."""
        found, names = self.spans, self.head.span_labels
        columns = (found.labels, found.starts, found.ends, found.scores)
        return tuple(
            Span(label=names[kind], start_token=start, end_token=end, score=score)
            for kind, start, end, score in zip(
                *(column[first:last].tolist() for column in columns), strict=True
            )
        )


class _LabelDecoder(Decoder):
    def __init__(
        self,
        head: TokenClassification,
        starts_word: Mask | None,
        is_special: Mask | None,
        open_file: OpenFile | None,
    ) -> None:
        super().__init__(head.width)
        self._head, self._starts_word, self._is_special = head, starts_word, is_special
        if starts_word is not None and is_special is not None:
            # An added token is a word by itself.
            self._starts_word = starts_word | is_special
            self._starts_word[1:] |= is_special[:-1]
        self._labels = Column(np.min_scalar_type(head.width - 1), open_file=open_file)
        self._scores = Column(np.float32, open_file=open_file)
        self._spans = SpanBuilder(head.table, head.scheme, open_file)
        rule = head.aggregation
        self._words = None
        if rule == "first" or rule == "average" or rule == "max":
            self._words = WordBuilder(rule, head.width)

    def _decode(self, rows: Double, first: int) -> None:
        tokens = np.empty(len(rows), UNIT)
        scores = softmax(rows)
        tokens["label"], tokens["score"] = rows.argmax(1), scores.max(1)
        self._labels.add(tokens["label"])
        self._scores.add(tokens["score"])
        if self._head.aggregation == "none":
            return
        tokens["start"] = np.arange(first, first + len(rows))
        tokens["end"] = tokens["start"] + 1
        if self._is_special is not None:
            tokens["label"][self._part(self._is_special, first, len(rows))] = -1
        if self._words is not None:
            assert self._starts_word is not None  # the head checks this
            is_average = self._head.aggregation == "average"
            starts = self._part(self._starts_word, first, len(rows))
            tokens = self._words.add(tokens, scores if is_average else None, starts)
        self._spans.add(tokens)

    @staticmethod
    def _part(mask: Mask, first: int, count: int) -> Mask:
        if len(mask) < first + count:
            raise ValueError(f"expected a mask of {first + count} tokens or more, got {len(mask)}")
        return mask[first : first + count]

    def finish(self) -> TokenLabels:
        if self._words is not None:
            self._spans.add(self._words.finish())
        return TokenLabels(
            self._head, self._labels.array(), self._scores.array(), self._spans.finish()
        )
