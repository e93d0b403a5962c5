"""From a model's outputs to the answers of its heads, and the limits on their size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.manifest import Manifest
from aftexport.chunked.document import storing
from aftexport.errors import EngineError
from aftexport.heads import Answer as HeadAnswer
from aftexport.heads import Head, TokenHead, TokenResult
from aftexport.heads.token_head import Column, Mask, OpenFile, file_opener
from aftexport.system.contract import EVIDENCE
from aftserve.errors import DocumentTooLongError
from aftserve.model.wanted import EVERY_HEAD, MAX_EVIDENCE_NUMBERS, ChosenLogit, Wanted

Added = NDArray[np.float32]
"""Contribution of each token of a document to a logit, ``[T]``."""
_VALUES = "answers for the tokens"
"""The name of the values in files, for messages."""
_MAX_HELD_BYTES = 1 << 20
"""Maximum bytes of a head's result for one document in memory; larger ones are kept in files."""
MAX_INLINE_TOKENS = 1 << 16
"""Maximum tokens of a document whose answers for tokens are part of one JSON object."""
_MAX_INLINE_NUMBERS = 1 << 20
"""Maximum numbers of such an answer, for heads with many numbers for each token."""
_DOCUMENTS = 4
"""Maximum tokens of a request's documents together, in documents of maximum length."""
_MAX_REQUEST_NUMBERS = _DOCUMENTS * MAX_EVIDENCE_NUMBERS
"""Maximum numbers in the evidence of a request of several documents, in memory: 64 MiB."""
_WITH_PADDING = {False: "", True: " with their padding"}


@dataclass(frozen=True)
class Decoding:
    """The part of a document that the heads for tokens need beside the rows of their outputs."""

    starts_word: Mask | None = None  # whether each token starts a word; None without a text
    is_special: Mask | None = None  # whether the tokenizer added each token; None for no such token
    keeps_rows: bool = False  # whether the answer keeps the rows, to compare them

    def with_rows(self) -> Self:
        """Return the same decoding for an answer that keeps the rows."""
        return replace(self, keeps_rows=True)


NO_MARKS = Decoding()
"""The decoding of token ids, of which no words are known."""


@dataclass(frozen=True)
class ExplainedLogit:
    """A logit as a sum over the tokens; see ``aftexport.lowering.evidence``."""

    head: str
    name: str  # its label or value
    logit: float
    offset: float  # the part of it that does not depend on the tokens
    added: Added  # contribution of each token
    index: int  # of the logit in its head
    sign: int  # -1 for the first of two labels of one logit

    def value(self, answer: "Answer") -> float:
        """Return this logit in the answer for another document."""
        return self.sign * float(answer.outputs[self.head][self.index])


@dataclass(frozen=True)
class Answer:
    """The answer for one document."""

    heads: dict[str, HeadAnswer]  # each requested head for documents
    # The logits [width] of these heads, in float64; also the rows [T, width] of each head for
    # tokens, if the decoding keeps them.
    outputs: dict[str, NDArray[Any]]
    tokens: dict[str, TokenResult] = field(default_factory=dict)  # each requested head for tokens
    explained: tuple[ExplainedLogit, ...] = ()
    # The window that decided each logit [width] of a head; empty for a document in one window.
    decided: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    def part(self, wanted: Wanted) -> Self:
        """Return only the wanted heads of an answer that may have more."""
        if wanted.heads is None:
            return self
        heads = {name: one for name, one in self.heads.items() if wanted.has(name)}
        tokens = {name: one for name, one in self.tokens.items() if wanted.has(name)}
        decided = {name: one for name, one in self.decided.items() if wanted.has(name)}
        return replace(self, heads=heads, tokens=tokens, decided=decided)


class RowSink:
    """The decoder of a document's rows for one head, which receives them block by block."""

    # open_file: None to keep the result in memory

    def __init__(self, head: TokenHead, decoding: Decoding, open_file: OpenFile | None) -> None:
        with storing(_VALUES):
            self._decoder = head.decoder(
                decoding.starts_word, is_special=decoding.is_special, open_file=open_file
            )
            self._rows = (
                Column(np.float32, (head.width,), open_file) if decoding.keeps_rows else None
            )

    def __call__(self, block: NDArray[Any]) -> None:
        """Decode the next rows, ``[1, n, width]``."""
        (rows,) = block
        _check_finite(rows)
        with storing(_VALUES):
            self._decoder.add(rows)
            if self._rows is not None:
                self._rows.add(rows)

    def finish(self) -> tuple[TokenResult, NDArray[Any] | None]:
        """Return the result, and the rows if they are kept."""
        with storing(_VALUES):
            return self._decoder.finish(), None if self._rows is None else self._rows.array()


class AnswerBuilder:
    """A builder of answers from the outputs of a model."""

    # folder: of the files of large results; None for that of the system

    def __init__(self, manifest: Manifest, folder: Path | None = None) -> None:
        self._manifest = manifest
        self.uses_files = True  # for large results
        self._open_file = file_opener(folder)
        self._documents: dict[str, Head] = {}
        self.token_heads: dict[str, TokenHead] = {}
        for name, head in manifest.heads.items():
            if isinstance(head, TokenHead) and head.is_per_token:
                self.token_heads[name] = head
            else:
                self._documents[name] = head

    @property
    def has_spans(self) -> bool:
        """Whether a head has spans, which need the characters of tokens."""
        return any("spans" in head.fields.values() for head in self.token_heads.values())

    def sinks(
        self, tokens: int, decoding: Decoding, wanted: Wanted = EVERY_HEAD
    ) -> dict[str, RowSink]:
        """Return a sink for the rows of each wanted head for tokens, of one document."""
        sinks = {}
        for name, head in self.token_heads.items():
            if not wanted.has(name):
                continue
            numbers = numbers_per_token(head) + head.width * decoding.keeps_rows
            is_large = 4 * numbers * tokens > _MAX_HELD_BYTES
            open_file = self._open_file if is_large and self.uses_files else None
            sinks[name] = RowSink(head, decoding, open_file)
        return sinks

    def answers(
        self,
        # Each wanted output; the evidence is [batch, chosen, tokens].
        outputs: Mapping[str, NDArray[Any]],
        lengths: Sequence[int],
        decodings: Sequence[Decoding],
        wanted: Sequence[Wanted],
    ) -> list[Answer]:
        """Return the answers of a run, for all documents; rows of padding are left out."""
        answers = []
        documents = zip(lengths, decodings, wanted, strict=True)
        for row, (length, decoding, part) in enumerate(documents):
            sinks = self.sinks(length, decoding, part)
            for name, sink in sinks.items():
                sink(outputs[name][row : row + 1, :length])
            answers.append(self.answer(outputs, row, length, sinks, part))
        return answers

    def answer(
        self,
        outputs: Mapping[str, NDArray[Any]],
        row: int,  # index of the document in the outputs
        length: int,  # of the document
        sinks: Mapping[str, RowSink],
        wanted: Wanted,
    ) -> Answer:
        """Return the answer of a document whose rows the sinks have received."""
        heads = {name: head for name, head in self._documents.items() if wanted.has(name)}
        logits = {name: outputs[name][row].astype(np.float64) for name in heads}
        for one in logits.values():
            _check_finite(one)
        answers: dict[str, HeadAnswer] = {
            name: head.answer(logits[name]) for name, head in heads.items()
        }
        for name, calibration in (self._manifest.calibration or {}).items():
            if (head := heads.get(name)) is None:
                continue
            answers[name] = calibration.applied(head, answers[name], logits[name], length)
        finished = {name: sink.finish() for name, sink in sinks.items()}
        rows = {name: rows for name, (_, rows) in finished.items() if rows is not None}
        answer = Answer(
            answers, logits | rows, {name: result for name, (result, _) in finished.items()}
        )
        if not wanted.explained:
            return answer
        explained = [
            self._explained(answer, chosen, outputs[EVIDENCE][row, column, :length])
            for column, chosen in enumerate(wanted.explained)
            if self._is_explained(answer, chosen)
        ]
        return replace(answer, explained=tuple(explained))

    def _is_explained(self, answer: Answer, chosen: ChosenLogit) -> bool:
        if not chosen.must_hold or chosen.index is None:
            return True
        name = self._documents[chosen.head].logit_names[chosen.index]
        return name in getattr(answer.heads[chosen.head], "labels", ())

    def _explained(self, answer: Answer, chosen: ChosenLogit, added: Added) -> ExplainedLogit:
        logits, head = answer.outputs[chosen.head], self._documents[chosen.head]
        index = int(logits.argmax()) if chosen.index is None else chosen.index
        assert self._manifest.evidence_heads is not None  # checked by AnswerOptions.wanted
        return ExplainedLogit(
            chosen.head,
            head.logit_names[index] if chosen.sign > 0 else head.names[0],
            chosen.sign * float(logits[index]),
            chosen.sign * self._manifest.evidence_heads[chosen.head][index],
            # Copy the row: a view would keep a block of the engine's memory with every answer.
            np.multiply(added, chosen.sign, dtype=added.dtype),
            index,
            chosen.sign,
        )


def _check_finite(logits: NDArray[Any]) -> None:
    if not np.isfinite(logits).all():
        raise EngineError(
            "The model's output must be finite, got NaN or infinity.", "Send another document."
        )


def numbers_per_token(head: Head) -> int:
    """Return how many numbers the answer of a head has for each token; 0 without any."""
    if not head.is_per_token:
        return 0
    return head.width if "vectors" in head.fields.values() else 1


def max_inline_tokens(heads: Mapping[str, Head]) -> int | None:
    """Return the maximum tokens of a document with an inline answer; None without a limit."""
    numbers = sum(map(numbers_per_token, heads.values()))
    return min(MAX_INLINE_TOKENS, max(1, _MAX_INLINE_NUMBERS // numbers)) if numbers else None


class InlineTokens:
    """The tokens of one request whose answers are part of one JSON object, or of lines of them."""

    # is_padded: whether documents are padded to the longest
    # explained: number of logits with evidence: each has a number for each token

    def __init__(self, *, is_padded: bool = False, explained: int = 0) -> None:
        self._is_padded = is_padded
        self._explained = explained
        self._total = 0
        self._evidence = 0

    def add(self, heads: Mapping[str, Head], lengths: Sequence[int]) -> None:
        """Count the tokens of documents.

        Raises:
            DocumentTooLongError: if a document, or the request, has too many for its answer.
        """
        # lengths: tokens of each document
        self._add_evidence(lengths)
        limit = max_inline_tokens(heads)
        if limit is None:
            return
        if (longest := max(lengths, default=0)) > limit:
            raise DocumentTooLongError(
                f"An answer for each token in one JSON object must have at most {limit} tokens, "
                f"got {longest}.",
                "Send one document with the header Accept: application/x-ndjson to stream its "
                "answer, or request binary tensors by the Open Inference Protocol.",
            )
        total = self._total + (longest * len(lengths) if self._is_padded else sum(lengths))
        if total > _DOCUMENTS * limit:
            raise DocumentTooLongError(
                f"The answers for each token of a request must have at most {_DOCUMENTS * limit} "
                f"tokens together, got {total}{_WITH_PADDING[self._is_padded]}.",
                "Send the documents in several requests.",
            )
        self._total = total

    def _add_evidence(self, lengths: Sequence[int]) -> None:
        """Count the numbers of the evidence; one document has its own limit."""
        total = self._evidence + self._explained * sum(lengths)
        is_single = not self._evidence and len(lengths) == 1
        if total > _MAX_REQUEST_NUMBERS and not is_single:
            raise DocumentTooLongError(
                f"The evidence of a request must have at most {_MAX_REQUEST_NUMBERS} numbers, one "
                f"for each token and explained logit, got {total}.",
                "Send the documents in several requests, or explain fewer labels or values.",
            )
        self._evidence = total
