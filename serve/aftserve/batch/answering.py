"""Classification of many documents without a server, with the server's answers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.errors import (
    AftexportError,
    BundleError,
    EngineError,
    InputError,
    ParityError,
    StorageError,
)
from aftserve.batch.sharing import shared_runs
from aftserve.model.answers import Answer
from aftserve.model.inputs import TokenizedDocument, cut_document
from aftserve.model.load import load_model
from aftserve.model.npy_file import read_npy_file
from aftserve.model.results import TokenAnswers, token_answers
from aftserve.settings import Settings
from aftserve.types import ExtraFields, Tokens

_MAX_HELD_TOKENS = 1 << 22
"""Maximum tokens of the documents that are held at a time, unless a single one has more."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a document: an answer or an error.

    Attributes:
        answer: the answer of each head.
        error: the problem and its remedy.
        tokens_total: tokens of the document; 0 if unknown.
        tokens_used: tokens that the model saw.
        tokens: the answers for the tokens; None without an answer.
    """

    answer: Answer | None = None
    error: str | None = None
    tokens_total: int = 0
    tokens_used: int = 0
    tokens: TokenAnswers | None = None


class OfflineClassifier:
    """The model of a bundle, loaded and compared with its golden cases.

    Args:
        settings: settings of the server; settings of requests and the queue are ignored.
        digest: required digest of the bundle; None for any.

    Raises:
        AftexportError: if the model cannot be loaded.
        ParityError: if the golden cases are out of bound.
    """

    def __init__(self, settings: Settings, digest: str | None = None) -> None:
        bundle = Bundle.open(settings.bundle)
        if digest is not None and bundle.digest != digest:
            raise BundleError(bundle.path, "it changed meanwhile", "Start the run again.")
        self._budget_tokens = settings.budget_tokens
        self._spill = settings.spill
        self._model = load_model(bundle, settings, Console(quiet=True))
        if self._model.breach is not None:
            raise ParityError(f"{bundle.path}: {self._model.breach}.", "Export the model again.")
        self._model.classifier.keep_answers_in_memory()
        self._model.measurement.measure_all()

    def answer(
        self,
        documents: Iterable[str | Path | AftexportError],
        given: Iterable[ExtraFields] | None = None,
    ) -> list[Outcome]:
        """Classify documents in shared runs; if a run fails, each of them gets a single run.

        Args:
            documents: texts, paths of .npy files, or errors in place of texts that could not be
                read; none is kept.
            given: extra inputs of each document; None for none.
        """
        outcomes: list[Outcome] = []
        held: dict[int, TokenizedDocument] = {}
        fields = iter(() if given is None else given)
        # A zip of both would hold the previous document.
        for index, document in enumerate(documents):
            extras = next(fields, {})
            outcomes.append(Outcome())
            try:
                held[index] = self._tokenized(document, extras)
            except AftexportError as error:
                outcomes[index] = Outcome(error=str(error))
            if sum(len(one.ids) for one in held.values()) > _MAX_HELD_TOKENS:
                self._run(held, outcomes)
                held = {}
        self._run(held, outcomes)
        return outcomes

    def _tokenized(
        self, document: str | Path | AftexportError, given: ExtraFields
    ) -> TokenizedDocument:
        if isinstance(document, AftexportError):
            raise document
        classifier = self._model.classifier
        if isinstance(document, Path):
            tokens = self._read(document)
            return cut_document(
                classifier, tokens, tokens, None, classifier.check_extras(given, len(tokens))
            )
        ids, marks = classifier.encode_marked(document)
        # Only spans need the text: do not hold it for other models.
        extras = classifier.check_extras(given, len(ids))
        return cut_document(classifier, ids if marks is None else document, ids, marks, extras)

    def _read(self, path: Path) -> Tokens:
        classifier = self._model.classifier
        try:
            classifier.check_words(None)
            return read_npy_file(path, classifier, self._spill)
        except OSError as error:
            raise InputError(f"The file cannot be read ({error.strerror}).", "Check it.") from error

    def _run(self, documents: dict[int, TokenizedDocument], outcomes: list[Outcome]) -> None:
        """Run tokenized documents, and write their outcomes to their places."""
        classifier = self._model.classifier
        places, inputs = list(documents), list(documents.values())
        runs = shared_runs(
            [len(one.used) for one in inputs],
            self._model.costs,
            budget_tokens=self._budget_tokens,
            masks_padding=classifier.masks_padding,
        )
        for run in runs:
            for index, result in zip(run, self._answers([inputs[i] for i in run]), strict=True):
                one = inputs[index]
                outcomes[places[index]] = (
                    self._outcome(one, result)
                    if isinstance(result, Answer)
                    else Outcome(None, str(result), len(one.ids), 0)
                )

    def _outcome(self, one: TokenizedDocument, answer: Answer) -> Outcome:
        tokens = token_answers(self._model.classifier.manifest.heads, one, answer)
        return Outcome(answer, None, len(one.ids), len(one.used), tokens)

    def _answers(self, documents: Sequence[TokenizedDocument]) -> Iterator[Answer | AftexportError]:
        """Yield the answers of one run; if it fails, yield the answers of single runs."""
        classifier = self._model.classifier
        try:
            if len(documents) == 1 and classifier.in_chunks(len(documents[0].used)):
                yield self._in_chunks(documents[0])
            else:
                yield from classifier.classify(
                    [one.used for one in documents],
                    decodings=[one.decoding for one in documents],
                    extras=[one.extras for one in documents],
                )
        except StorageError as error:
            yield error
        except EngineError as error:
            if len(documents) == 1:
                yield EngineError(f"The engine failed: {error}", "Leave the document out.")
                return
            for one in documents:
                yield from self._answers([one])

    def _in_chunks(self, one: TokenizedDocument) -> Answer:
        parts = self._model.classifier.parts(one.used, one.extras, decoding=one.decoding)
        while True:
            try:
                next(parts)
            except StopIteration as finished:
                answer: Answer = finished.value
                return answer
