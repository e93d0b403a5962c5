"""Classification of many documents without a server, with the server's answers."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import cast

from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.errors import (
    AftexportError,
    BundleError,
    EngineError,
    InputError,
    ParityError,
    StorageError,
    UsageError,
)
from aftserve.errors import document_failures
from aftserve.model.answers import Answer
from aftserve.model.costs import BATCH_LENGTHS, MIN_BATCH_GAIN, CostModel
from aftserve.model.documents import (
    TokenAnswers,
    TokenizedDocument,
    check_evidence,
    cut_document,
    token_answers,
    tokenized_text,
    windows_of,
)
from aftserve.model.evidence import FurtherRuns
from aftserve.model.load import load_model
from aftserve.model.npy_file import read_npy_file
from aftserve.model.wanted import EVERY_HEAD, Wanted
from aftserve.scheduling.batching import MAX_LENGTH_RATIO
from aftserve.schemas import DocumentResult, Timings, Windows
from aftserve.settings import Settings
from aftserve.types import Document, ExtraFields, Text, Tokens

_MAX_HELD_TOKENS = 1 << 22
"""Maximum tokens of the documents that are held at a time, unless a single one has more."""
_MAX_HELD_DOCUMENTS = 1 << 14
"""Maximum documents that are held at a time: more would not make runs of more similar lengths."""
_MIN_MEASURED_DOCUMENTS = 256
"""Documents held at a time for which the costs of shared runs are measured; fewer run alone."""
_NO_MORE = object()
"""The end of the extra inputs; None may be one of them by mistake."""
Finish = Callable[[TokenizedDocument, Answer, Timings], DocumentResult]
"""A function that makes the server's answer for a document."""
Source = Document | Path | AftexportError
"""A document, the path of a .npy file, or the error in place of a text that cannot be read."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a document: an answer or an error."""

    answer: Answer | None = None
    error: AftexportError | None = None
    tokens_total: int = 0
    """Tokens of the document; 0 if unknown."""
    tokens_used: int = 0
    """Tokens that the model saw."""
    tokens: TokenAnswers | None = None
    """The answers for the tokens; None without an answer."""
    windows: Windows | None = None
    """The windows of the document, if the bundle declares them."""
    result: DocumentResult | None = None
    """The server's answer, if it was asked for."""


@dataclass(frozen=True)
class _Held:
    """A tokenized document that waits for its run."""

    document: TokenizedDocument
    since: float  # by time.perf_counter()


def _with_fields(
    documents: Iterable[Source], given: Iterable[ExtraFields] | None
) -> Iterator[tuple[Source, ExtraFields]]:
    """Yield each document with its extra inputs; UsageError if there are more or fewer."""
    fields = None if given is None else iter(given)
    remedy = "Give one mapping for each document."
    count = 0
    for document in documents:
        extras = {} if fields is None else next(fields, _NO_MORE)
        if extras is _NO_MORE:
            raise UsageError(
                f"Expected extra inputs for each document, got {count} for more documents.", remedy
            )
        yield document, cast(ExtraFields, extras)
        del document  # its text need not be held any longer
        count += 1
    if fields is not None and next(fields, _NO_MORE) is not _NO_MORE:
        raise UsageError(f"Expected extra inputs for each of {count} documents, got more.", remedy)


class OfflineClassifier:
    """The model of a bundle, loaded and compared with its golden cases; threads may share it."""

    # Settings of requests and of the queue are ignored. A bundle of another digest is refused.

    def __init__(self, settings: Settings, digest: str | None = None) -> None:
        bundle = Bundle.open(settings.bundle)
        if digest is not None and bundle.digest != digest:
            raise BundleError(bundle.path, "it changed meanwhile", "Start the run again.")
        self.bundle = bundle
        self._turn = Lock()
        self._budget_tokens = settings.budget_tokens
        self._spill = settings.spill
        self._model = load_model(bundle, settings, Console(quiet=True))
        if self._model.breach is not None:
            raise ParityError(f"{bundle.path}: {self._model.breach}.", self._model.remedy)
        self.classifier = self._model.classifier
        self.classifier.keep_answers_in_memory()
        self._costs = self._model.measurement.costs
        self._measured_tokens = 0

    def answer(
        self,
        documents: Iterable[Source],
        given: Iterable[ExtraFields] | None = None,
        *,
        finish: Finish | None = None,
        wanted: Wanted = EVERY_HEAD,
        on_done: Callable[[int], None] | None = None,
    ) -> Iterator[Outcome]:
        """Yield the outcomes in order; if a shared run fails, each of its documents runs alone."""
        # Documents are consumed as needed. ``finish`` makes the results of outcomes, and
        # ``on_done`` gets the number of documents after each run.
        outcomes: list[Outcome] = []
        held: dict[int, _Held] = {}
        tokens = 0
        done = on_done or (lambda _: None)
        for document, extras in _with_fields(documents, given):
            outcomes.append(Outcome())
            try:
                with document_failures():
                    one = self._tokenized(document, extras, wanted)
            except AftexportError as error:
                outcomes[-1] = Outcome(error=error)
                done(1)
            else:
                held[len(outcomes) - 1] = _Held(one, time.perf_counter())
                tokens += len(one.ids)
            if tokens > _MAX_HELD_TOKENS or len(outcomes) >= _MAX_HELD_DOCUMENTS:
                self._run(held, outcomes, finish, wanted, done)
                yield from outcomes
                outcomes, held, tokens = [], {}, 0
        self._run(held, outcomes, finish, wanted, done)
        yield from outcomes

    def _tokenized(self, document: Source, given: ExtraFields, wanted: Wanted) -> TokenizedDocument:
        if isinstance(document, AftexportError):
            raise document
        classifier = self.classifier
        if isinstance(document, Text):
            start = time.perf_counter()
            encoded = classifier.encode_marked(document)
            # Only spans and evidence need the text: do not hold it for other answers.
            is_kept = encoded.marks is not None or wanted.explained
            one = tokenized_text(classifier, document if is_kept else encoded.ids, encoded, given)
            one = replace(one, tokenize_seconds=time.perf_counter() - start)
        else:
            ids = self._tokens(document, wanted)
            extras = classifier.check_extras(given, len(ids))
            one = cut_document(classifier, ids, ids, None, extras)
        check_evidence(classifier, wanted, len(one.used))
        return one

    def _tokens(self, document: Document | Path, wanted: Wanted) -> Tokens:
        self.classifier.check_words(None, wanted)
        if isinstance(document, Path):
            return self._read(document)
        return self.classifier.check(document)

    def _read(self, path: Path) -> Tokens:
        try:
            return read_npy_file(path, self.classifier, self._spill)
        except OSError as error:
            raise InputError(f"The file cannot be read ({error.strerror}).", "Check it.") from error

    def _run(
        self,
        held: dict[int, _Held],
        outcomes: list[Outcome],
        finish: Finish | None,
        wanted: Wanted,
        on_done: Callable[[int], None],
    ) -> None:
        """Run documents, and write their outcomes to their places."""
        places = list(held)
        lengths = [len(one.document.used) for one in held.values()]
        costs = self._costs_of(lengths)
        runs = list(
            shared_runs(
                lengths,
                costs,
                budget_tokens=self._budget_tokens,
                masks_padding=self.classifier.masks_padding,
            )
        )
        predicted = sum(costs.batch(len(run), max(lengths[i] for i in run)) for run in runs)
        for run in runs:
            waiting = [held[places[i]] for i in run]
            with self._turn:
                start = time.perf_counter()
                results = list(self._answers([one.document for one in waiting], wanted))
                seconds = time.perf_counter() - start
            for i, one, result in zip(run, waiting, results, strict=True):
                timings = Timings(
                    tokenize_seconds=one.document.tokenize_seconds,
                    queue_seconds=start - one.since,
                    inference_seconds=seconds,
                    predicted_seconds=predicted,
                )
                outcomes[places[i]] = self._outcome(one.document, result, finish, timings)
            on_done(len(run))

    def _costs_of(self, lengths: Sequence[int]) -> CostModel:
        """Return the costs of runs, measured up to the documents that may share one."""
        # A measurement takes as long as some 200 documents of its longest.
        short = [tokens for tokens in lengths if tokens <= BATCH_LENGTHS[-1]]
        with self._turn:
            if len(short) >= _MIN_MEASURED_DOCUMENTS:
                longest = next(one for one in BATCH_LENGTHS if one >= max(short))
                if longest > self._measured_tokens:
                    measurement = self._model.measurement.up_to(longest)
                    measurement.measure_all()
                    self._costs, self._measured_tokens = measurement.costs, longest
            return self._costs

    def _outcome(
        self,
        one: TokenizedDocument,
        answer: Answer | AftexportError,
        finish: Finish | None,
        timings: Timings,
    ) -> Outcome:
        if not isinstance(answer, Answer):
            return Outcome(None, answer, len(one.ids), 0)
        tokens = token_answers(self.bundle.manifest.heads, one, answer)
        result = windows = None
        if self.classifier.windowed is not None:
            windows = windows_of(self.bundle.manifest, one, answer)
        if finish is not None:
            try:
                result = finish(one, answer, timings)
            except AftexportError as error:  # of a run without a passage
                return Outcome(None, error, len(one.ids), 0)
            # The result has the passages: do not hold the numbers of each token with every answer.
            answer = replace(answer, explained=()) if answer.explained else answer
        return Outcome(answer, None, len(one.ids), len(one.used), tokens, windows, result)

    def run_again(self, again: FurtherRuns[None]) -> None:
        """Run further documents, each time those that the answers lead to; raises their error."""
        try:
            documents, wanted = next(again)
            while True:
                with self._turn:
                    found = [next(self._answers([one], wanted)) for one in documents]
                for error in found:
                    if not isinstance(error, Answer):
                        raise error
                documents, wanted = again.send([one for one in found if isinstance(one, Answer)])
        except StopIteration:
            return

    def _answers(
        self, documents: Sequence[TokenizedDocument], wanted: Wanted
    ) -> Iterator[Answer | AftexportError]:
        """Yield the answers of one run; if it fails, yield the answers of single runs."""
        classifier = self.classifier
        try:
            if len(documents) == 1 and classifier.in_chunks(len(documents[0].used)):
                yield self._in_chunks(documents[0], wanted)
            else:
                yield from classifier.classify(
                    [one.used for one in documents],
                    decodings=[one.decoding for one in documents],
                    extras=[one.extras for one in documents],
                    wanted=[wanted] * len(documents),
                )
        except StorageError as error:
            yield error
        except EngineError as error:
            if len(documents) == 1:
                yield EngineError(f"The engine failed: {error}", "Leave the document out.")
                return
            for one in documents:
                yield from self._answers([one], wanted)

    def _in_chunks(self, one: TokenizedDocument, wanted: Wanted) -> Answer:
        parts = self.classifier.parts(one.used, one.extras, decoding=one.decoding, wanted=wanted)
        while True:
            try:
                next(parts)
            except StopIteration as finished:
                answer: Answer = finished.value
                return answer


def shared_runs(
    lengths: Sequence[int], costs: CostModel, *, budget_tokens: int, masks_padding: bool
) -> Iterator[list[int]]:
    """Yield the indices of documents that share a run, which costs less than single runs."""
    run: list[int] = []
    seconds = 0.0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length, documents = lengths[index], len(run) + 1
        near = run and length <= (MAX_LENGTH_RATIO if masks_padding else 1) * lengths[run[0]]
        if near and documents * length <= budget_tokens:
            joined = costs.batch(documents, length)
            if joined < (1 - MIN_BATCH_GAIN) * (seconds + costs.single(length)):
                run.append(index)
                seconds = joined
                continue
        if run:
            yield run
        run, seconds = [index], costs.single(length)
    if run:
        yield run
