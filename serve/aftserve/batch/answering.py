"""Answers to documents as the server gives them, many at a time and without a server."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from aftexport.bundle import Bundle
from aftexport.errors import AftexportError, BundleError, EngineError, ParityError, StorageError
from aftserve.batch.sharing import shared_runs
from aftserve.model.classifier import Answer
from aftserve.model.load import load_model
from aftserve.settings import Settings
from aftserve.types import Tokens

_MOST_TOKENS = 1 << 22
"""Of documents that are held at a time, unless a single one has more."""


@dataclass(frozen=True)
class Outcome:
    """What became of a document: an answer or an error.

    Attributes:
        answer: label and scores.
        error: why there is none, and what helps.
        tokens_total: of the document; 0 where they are not known.
        tokens_used: that the model saw.
    """

    answer: Answer | None = None
    error: str | None = None
    tokens_total: int = 0
    tokens_used: int = 0


class OfflineClassifier:
    """The model of a bundle, loaded and compared with its golden cases.

    Args:
        settings: of the server; those of requests, queue and deadlines say nothing here.
        digest: that the bundle must have; any where it is None.

    Raises:
        AftexportError: where it cannot be loaded.
        ParityError: where its golden cases are outside the bound.
    """

    def __init__(self, settings: Settings, digest: str | None = None) -> None:
        bundle = Bundle.open(settings.bundle)
        if digest is not None and bundle.digest != digest:
            raise BundleError(bundle.path, "it changed meanwhile", "Begin again.")
        self._budget_tokens = settings.budget_tokens
        self._model = load_model(bundle, settings, Console(quiet=True))
        if self._model.breach is not None:
            raise ParityError(f"{bundle.path}: {self._model.breach}.", "Export the model again.")

    def answer(self, documents: Iterable[str | AftexportError]) -> list[Outcome]:
        """Answers texts in runs of several; one that fails fails alone.

        Args:
            documents: texts, and errors in place of those that could not be read; no text is kept.
        """
        outcomes: list[Outcome] = []
        held: dict[int, Tokens] = {}
        for index, document in enumerate(documents):
            outcomes.append(Outcome())
            try:
                held[index] = self._tokens(document)
            except AftexportError as error:
                outcomes[index] = Outcome(error=str(error))
            if sum(map(len, held.values())) > _MOST_TOKENS:
                self._run(held, outcomes)
                held = {}
        self._run(held, outcomes)
        return outcomes

    def _tokens(self, document: str | AftexportError) -> Tokens:
        if isinstance(document, AftexportError):
            raise document
        return self._model.classifier.encode(document)

    def _run(self, documents: dict[int, Tokens], outcomes: list[Outcome]) -> None:
        """Writes the outcomes of documents of checked tokens to their places."""
        classifier = self._model.classifier
        places = list(documents)
        used = [classifier.cut(ids) for ids in documents.values()]
        runs = shared_runs(
            [len(ids) for ids in used],
            self._model.costs,
            budget_tokens=self._budget_tokens,
            masks_padding=classifier.masks_padding,
        )
        for run in runs:
            for index, result in zip(run, self._answers([used[i] for i in run]), strict=True):
                place, tokens = places[index], len(used[index])
                total = len(documents[place])
                outcomes[place] = (
                    Outcome(result, None, total, tokens)
                    if isinstance(result, Answer)
                    else Outcome(None, str(result), total, 0)
                )

    def _answers(self, documents: Sequence[Tokens]) -> Iterator[Answer | AftexportError]:
        """Of one run; where that fails, of a run of each alone."""
        classifier = self._model.classifier
        try:
            if len(documents) == 1 and classifier.in_chunks(len(documents[0])):
                yield self._in_chunks(documents[0])
            else:
                yield from classifier.classify(documents)
        except StorageError as error:
            yield error
        except EngineError as error:
            if len(documents) == 1:
                yield EngineError(f"The engine failed: {error}", "Leave the document out.")
                return
            for ids in documents:
                yield from self._answers([ids])

    def _in_chunks(self, ids: Tokens) -> Answer:
        parts = self._model.classifier.parts(ids, evidence=False)
        while True:
            try:
                next(parts)
            except StopIteration as finished:
                answer: Answer = finished.value
                return answer
