"""From an answer to the result of a document, complete or in parts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from aftexport.bundle.bundle import Bundle
from aftexport.heads import Answer as HeadAnswer
from aftexport.heads import Head, Span, TokenResult, is_one_label
from aftserve.model.answers import Answer, numbers_per_token
from aftserve.model.inputs import TokenizedDocument
from aftserve.schemas import DocumentResult, Timings
from aftserve.settings import Policy

_MAX_PART_TOKENS = 4096
_MAX_PART_SPANS = 1024
_MAX_PART_NUMBERS = 1 << 14


class TokensPart(BaseModel):
    """A line of a streamed answer: the answers of a head for some tokens."""

    head: str = Field(description="Name of the head.")
    start_token: int = Field(description="Index of the first of these tokens in the document.")
    labels: tuple[str, ...] | None = Field(default=None, description="Label of each token.")
    scores: tuple[float, ...] | None = Field(
        default=None, description="Probability of each of these labels."
    )
    vectors: tuple[tuple[float, ...], ...] | None = Field(
        default=None, description="Vector of each token, or its values in a regression."
    )


class SpansPart(BaseModel):
    """A line of a streamed answer: the spans of a head that start in the line before."""

    head: str
    spans: tuple[Span, ...]


class StreamEnd(BaseModel):
    """The last line of a streamed answer; without it, the answer is not complete."""

    complete: Literal[True] = True
    lines: int = Field(description="Number of the lines before.")


@dataclass(frozen=True)
class TokenAnswers:
    """The answers for the tokens of a document."""

    heads: Mapping[str, Head]
    results: Mapping[str, TokenResult]  # of each head for tokens
    first: int  # index of the first token that the model saw
    text: str | None  # the document, if it is a text
    characters: NDArray[np.uint32] | None  # of each token that the model saw; see TokenMarks

    def answer(self, name: str, start: int = 0, end: int | None = None) -> HeadAnswer:
        """Return the answer of a head for a part of the tokens that the model saw.

        Spans have indices of all tokens, and of the characters of a text.
        """
        answer = self.results[name].answer(start, end)
        spans: tuple[Span, ...] | None = getattr(answer, "spans", None)
        if not spans:
            return answer
        return answer.model_copy(update={"spans": tuple(map(self._placed, spans))})

    def all_spans(self, name: str) -> Iterator[Span]:
        """Yield the spans of a head without the labels of its tokens; see ``answer``."""
        first = 0
        while spans := self.results[name].named_spans(first, first + _MAX_PART_SPANS):
            yield from map(self._placed, spans)
            first += len(spans)

    def parts(self) -> Iterator[TokensPart | SpansPart]:
        """Yield the answers of all heads in parts of bounded size."""
        for name, result in self.results.items():
            width = numbers_per_token(self.heads[name])
            step = max(1, min(_MAX_PART_TOKENS, _MAX_PART_NUMBERS // width))
            for start in range(0, len(result), step):
                answer = self.answer(name, start, min(start + step, len(result)))
                fields = {field: getattr(answer, field) for field in type(answer).kinds()}
                spans = fields.pop("spans", ())
                yield TokensPart(head=name, start_token=self.first + start, **fields)
                if spans:
                    yield SpansPart(head=name, spans=spans)

    def _placed(self, span: Span) -> Span:
        fields: dict[str, Any] = {
            "start_token": span.start_token + self.first,
            "end_token": span.end_token + self.first,
        }
        if self.text is not None and self.characters is not None:
            places = self.characters[span.start_token : span.end_token]
            places = places[places[:, 0] < places[:, 1]]
            if len(places):
                start, end = int(places[0, 0]), int(places[-1, 1])
                fields |= {"start": start, "end": end, "text": self.text[start:end]}
        return span.model_copy(update=fields)


@dataclass(frozen=True)
class DocumentAnswer:
    """The result of a document, with the answers for its tokens apart."""

    result: DocumentResult  # without the heads for tokens
    tokens: TokenAnswers
    # [width] of each requested head for documents.
    logits: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def of_head(self, name: str) -> Any:
        """Return the answer of a head for documents; None if it is not requested.

        The answer of a model of one label is the result itself, which has the same fields.
        """
        heads = self.result.heads
        return self.result if heads is None else heads.get(name)

    def complete(self) -> DocumentResult:
        """Return the result with every head; the answers for all tokens are in memory then."""
        if not self.tokens.results:
            return self.result
        answers = self.result.heads or {}
        heads = {
            name: answers[name] if name in answers else self.tokens.answer(name)
            for name in self.tokens.heads
            if name in answers or name in self.tokens.results
        }
        return self.result.model_copy(update={"heads": heads})


def token_answers(
    heads: Mapping[str, Head], one: TokenizedDocument, answer: Answer
) -> TokenAnswers:
    """Return the answers for the tokens of a document."""
    text = one.document if isinstance(one.document, str) else None
    characters = None if one.marks is None else one.marks.characters
    return TokenAnswers(heads, answer.tokens, one.first, text, characters)


def document_answer(
    bundle: Bundle, policy: Policy, one: TokenizedDocument, answer: Answer, timings: Timings
) -> DocumentAnswer:
    """Return the result of a document, with the answers for its tokens apart."""
    heads = bundle.manifest.heads
    content = DocumentResult(
        bundle=bundle.digest,
        **head_fields(heads, answer),
        tokens_total=len(one.ids),
        tokens_used=len(one.used),
        truncated=len(one.used) < len(one.ids),
        policy=policy,
        timings=timings,
    )
    logits = {name: answer.outputs[name] for name in answer.heads}
    return DocumentAnswer(content, token_answers(heads, one, answer), logits)


def head_fields(heads: Mapping[str, Head], answer: Answer) -> dict[str, Any]:
    """Return the fields of a document's result that its heads for documents fill."""
    if is_one_label(heads):
        (content,) = answer.heads.values()
        return content.model_dump()
    return {"heads": answer.heads}
