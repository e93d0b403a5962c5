"""One label for every token: the scores are a softmax, and runs of tokens are spans."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from annotated_types import Len
from numpy.typing import NDArray
from pydantic import Field, model_validator

from aftexport.errors import InputError, UsageError
from aftexport.heads.answer import Answer, Span, Spans, TokenNames, TokenNumbers
from aftexport.heads.head import Double, check_distinct, flips_of_largest, numbered, softmax
from aftexport.heads.token_head import Column, Decoder, Mask, OpenFile, TokenHead, TokenResult
from aftexport.heads.token_spans import (
    UNIT,
    LabelTable,
    Scheme,
    SpanBuilder,
    TokenSpans,
    WordBuilder,
    scheme_of,
)

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
