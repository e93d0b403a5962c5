"""The two ends of a document's way: its tokens before the run, and its result after it."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.manifest import Manifest
from aftexport.chunked.windows import WindowedDocument
from aftexport.errors import InputError
from aftexport.extra_inputs import ExtraValues
from aftexport.heads import Answer as HeadAnswer
from aftexport.heads import Head, Span, TokenResult, is_one_label
from aftexport.system.contract import largest
from aftserve.http.clients import LoopTurns, current_client
from aftserve.model.answers import NO_MARKS, Answer, Decoding, numbers_per_token
from aftserve.model.classifier import Classifier, EncodedText
from aftserve.model.token_marks import TokenMarks
from aftserve.model.wanted import EVERY_HEAD, MAX_EVIDENCE_NUMBERS, Wanted
from aftserve.schemas import DecidingWindow, DocumentResult, Timings, Windows
from aftserve.settings import AnswerPolicy
from aftserve.types import Document, ExtraFields, Text, Tokens

T = TypeVar("T")
_THREADS = 2
_INLINE_NUMBERS = 1 << 14
"""Checking up to so many token ids or values of features takes less than a millisecond."""
_LONG_CHARACTERS = 1 << 16
"""Longer texts share one thread of their own, so that shorter ones do not wait for them."""


class TokenizerPool:
    """A pool of threads for work on documents outside the event loop.

    Work for a client that has left continues, and its thread must still count as busy. So the pool
    is not anyio's, which would start another thread.
    """

    def __init__(self, turns: LoopTurns) -> None:
        self._turns = turns
        self._threads = ThreadPoolExecutor(_THREADS, "tokenizer")
        self._long_thread = ThreadPoolExecutor(1, "long-tokenizer")
        self._client_turns = WeakValueDictionary[tuple[str, bool], asyncio.Semaphore]()

    async def encode(self, classifier: Classifier, text: Text) -> EncodedText:
        """Return the checked tokens of a text or a pair; see ``Classifier.encode_marked``."""
        if len(text) <= classifier.inline_characters:
            await self._turns.take()
            return classifier.encode_inline(text)
        return await self.run(text, partial(classifier.encode_marked, text))

    async def check(self, classifier: Classifier, document: Document) -> Tokens:
        """Return the checked tokens of token ids or features; see ``Classifier.check``."""
        if _count_numbers(document) <= _INLINE_NUMBERS:
            await self._turns.take()
            return classifier.check(document)
        return await self.run(document, partial(classifier.check, document))

    async def run(self, document: Document, work: Callable[[], T]) -> T:
        """Return the result of ``work`` on a document; work that has begun cannot be cancelled."""
        is_long = len(document) > _LONG_CHARACTERS
        threads, most = (self._long_thread, 1) if is_long else (self._threads, 2 * _THREADS)
        # The threads' queue has little work of each client, so clients take turns.
        key = current_client.get().name, is_long
        async with self._client_turns.setdefault(key, asyncio.Semaphore(most)):
            return await asyncio.get_running_loop().run_in_executor(threads, work)


def _count_numbers(document: Document) -> int:
    """Return the numbers of a document that are to be checked; 0 for features that were checked."""
    if isinstance(document, np.ndarray):
        return document.size
    if not isinstance(document, list) or not document:
        return 0
    first = document[0]
    return len(document) * (len(first) if isinstance(first, list | np.ndarray) else 1)


@dataclass(frozen=True)
class TokenizedDocument:
    """A document of a request, with its tokens."""

    document: Document  # as it was sent
    ids: Tokens
    used: Tokens  # the tokens that remain after the policy for long documents
    first: int  # index of the first token in used
    tokenize_seconds: float
    marks: TokenMarks | None  # of these tokens; None for ids, or if no head needs them
    extras: ExtraValues  # of these tokens

    @property
    def decoding(self) -> Decoding:
        """The decoding of the tokens in ``used``."""
        return NO_MARKS if self.marks is None else self.marks.decoding

    def without(self, start: int, end: int) -> Self:
        """Return the document without some of the tokens in ``used``; it has no marks."""
        left = _TokensLeft(self.used, start, end)
        inputs = {n: np.delete(x, slice(start, end), axis=0) for n, x in self.extras.tokens.items()}
        return replace(self, used=left, marks=None, extras=replace(self.extras, tokens=inputs))


@dataclass(frozen=True)
class _TokensLeft:
    """The tokens of a document without a passage, which are read from the whole document."""

    whole: Tokens
    start: int  # of the passage
    end: int

    def __len__(self) -> int:
        return len(self.whole) - (self.end - self.start)

    def __getitem__(self, tokens: slice, /) -> NDArray[Any]:
        first, last, _ = tokens.indices(len(self))
        left_out = self.end - self.start
        before = self.whole[first : min(last, self.start)]
        after = self.whole[max(first, self.start) + left_out : last + left_out]
        return np.concatenate([before, after])

    def tolist(self) -> Any:
        return self[:].tolist()


async def tokenize_documents(
    pool: TokenizerPool,
    classifier: Classifier,
    documents: Sequence[Document],
    given: Sequence[ExtraFields] | None = None,
    wanted: Wanted = EVERY_HEAD,
) -> list[TokenizedDocument]:
    """Tokenize documents, and cut them by the policy for long documents."""
    return [
        await tokenize_document(
            pool, classifier, index, document, {} if given is None else given[index], wanted
        )
        for index, document in enumerate(documents)
    ]


async def tokenize_document(
    pool: TokenizerPool,
    classifier: Classifier,
    index: int,  # of the document in its request, for the error message
    document: Document,
    given: ExtraFields,
    wanted: Wanted = EVERY_HEAD,
) -> TokenizedDocument:
    """Tokenize a document, and cut it by the policy for long documents.

    Raises:
        InputError: if the document cannot be classified.
    """
    try:
        if isinstance(document, Text):
            classifier.check_text(document)  # before it waits for a thread
            start = time.perf_counter()
            encoded = await pool.encode(classifier, document)
            one = tokenized_text(classifier, document, encoded, given)
            one = replace(one, tokenize_seconds=time.perf_counter() - start)
        else:
            ids = await pool.check(classifier, document)
            extras = classifier.check_extras(given, len(ids))
            one = cut_document(classifier, document, ids, None, extras)
        classifier.check_words(one.marks, wanted)
        check_evidence(classifier, wanted, len(one.used))
    except InputError as error:
        raise type(error)(f"document {index}: {error.problem}", error.remedy) from error
    return one


def tokenized_text(
    classifier: Classifier, document: Text | Tokens, encoded: EncodedText, given: ExtraFields
) -> TokenizedDocument:
    """Return an encoded text with its extra inputs, cut by the policy for long documents."""
    tokens = encoded.ids if encoded.used is None else encoded.used
    extras = classifier.check_extras(given, len(tokens), encoded.types)
    one = cut_document(classifier, document, tokens, encoded.marks, extras)
    return one if encoded.used is None else replace(one, ids=encoded.ids)


def cut_document(
    classifier: Classifier,
    document: Document,
    ids: Tokens,
    marks: TokenMarks | None,
    extras: ExtraValues,
) -> TokenizedDocument:
    """Cut a tokenized document by the policy for long documents."""
    used = classifier.cut(ids)
    first = len(ids) - len(used) if classifier.policy == "tail" else 0
    if marks is not None:
        marks = marks.part(first, first + len(used))
    extras = extras.part(first, first + len(used))
    return TokenizedDocument(document, ids, used, first, 0.0, marks, extras)


def check_evidence(classifier: Classifier, wanted: Wanted, tokens: int) -> None:
    """Raise InputError if this engine has no evidence for a document of this length."""
    if not wanted.explained:
        return
    if wanted.numbers != [largest(0)] and not classifier.engine.takes_choice:
        engine, first = classifier.engine.name, classifier.manifest.explained
        raise InputError(
            f"{engine} explains only the largest logit of {first}.",
            "Leave explain out, or serve the bundle with onnxruntime.",
        )
    most = max(1, MAX_EVIDENCE_NUMBERS // tokens)
    if len(wanted.explained) > most:
        raise InputError(
            f"Expected at most {most} labels or values to explain for a document of {tokens} "
            f"tokens, got {len(wanted.explained)}.",
            "Send some of them in each request.",
        )
    if classifier.windowed is not None and classifier.in_chunks(tokens):
        raise InputError(
            f"The document has {tokens} tokens and is read in windows, whose answers have no "
            "evidence together.",
            f"Send a document of at most {classifier.whole_tokens} tokens.",
        )
    plan = classifier.manifest.chunked
    if classifier.in_chunks(tokens) and plan is not None and not plan.evidence:
        raise InputError(
            f"The document has {tokens} tokens and runs in chunks, where this model pools them "
            "in a way that keeps no evidence.",
            f"Send a document of at most {classifier.whole_tokens} tokens.",
        )


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
    bundle: Bundle, policy: AnswerPolicy, one: TokenizedDocument, answer: Answer, timings: Timings
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
        windows=windows_of(bundle.manifest, one, answer) if policy == "windows" else None,
        timings=timings,
    )
    logits = {name: answer.outputs[name] for name in answer.heads}
    return DocumentAnswer(content, token_answers(heads, one, answer), logits)


def windows_of(manifest: Manifest, one: TokenizedDocument, answer: Answer) -> Windows:
    """Return the windows of a document, and those that decided."""
    policy, heads = manifest.windows, manifest.heads
    assert policy is not None  # checked by the callers
    document = WindowedDocument(policy, one.used)
    return Windows(
        count=len(document.cut) if len(one.used) > policy.tokens else 1,
        tokens=policy.tokens,
        stride=policy.stride,
        aggregate=policy.aggregate,
        decided=[
            DecidingWindow(
                head=name,
                name=logit,
                window=window,
                start_token=document.tokens_of(window)[0],
                end_token=document.tokens_of(window)[1],
            )
            for name, decided in answer.decided.items()
            for logit, window in zip(heads[name].logit_names, decided.tolist(), strict=True)
        ],
    )


def head_fields(heads: Mapping[str, Head], answer: Answer) -> dict[str, Any]:
    """Return the fields of a document's result that its heads for documents fill."""
    if is_one_label(heads):
        (content,) = answer.heads.values()
        return content.model_dump()
    return {"heads": answer.heads}
