"""The server's answers in this process, without a server."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from aftexport.errors import AftexportError, UsageError
from aftexport.heads import AnyHead
from aftexport.system.console import document_bar
from aftserve.batch.answering import OfflineClassifier, Outcome
from aftserve.batch.python_values import checked_document, plain_fields
from aftserve.client.request import Fields, Names
from aftserve.client.results import Result
from aftserve.model.answers import Answer
from aftserve.model.documents import TokenizedDocument, document_answer
from aftserve.model.evidence import add_evidence, check
from aftserve.model.evidence import explain as explain_answer
from aftserve.model.wanted import MAX_CHECKS, AnswerOptions
from aftserve.schemas import DocumentResult, Timings
from aftserve.settings import Policy, Settings

Document = str | tuple[str, str] | Sequence[int] | Sequence[Sequence[float]] | NDArray[Any]
"""A text, a pair of texts, token ids ``[T]``, or features ``[T, F]``."""


class Predictor:
    """A model that answers in this process as ``aftserve`` does; it needs no torch.

    It is compared with its golden cases when it is loaded. Threads may share it; their documents
    take turns. Documents of similar length share runs, and long documents run in chunks.

    Args:
        bundle: a folder written by aftexport.
        engine: onnxruntime, tensorrt, or auto for TensorRT if bundle and machine allow it.
        provider: execution provider of ONNX Runtime, cpu or cuda.
        threads: threads of the engine; by default one for each usable core.
        long_documents: treatment of a document over the memory budget: exact runs it in chunks, or
            in the windows that the bundle declares; reject refuses it, head and tail cut it.
        memory_budget_mib: maximum MiB of one run beside the weights, as predicted. A document that
            needs more runs in chunks, or is refused if the model has none.
        max_tokens: maximum tokens of a document; by default the model's limit.
        spill: folder for the values of long documents between layers; by default the system's
            folder for temporary files.

    Raises:
        AftexportError: if the bundle cannot be loaded.
        ParityError: if its answers differ from PyTorch's by more than the tolerance.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        *,
        engine: Literal["auto", "onnxruntime", "tensorrt"] = "auto",
        provider: Literal["cpu", "cuda"] = "cpu",
        threads: int | None = None,
        long_documents: Policy = "exact",
        memory_budget_mib: float = 512,
        max_tokens: int | None = None,
        spill: str | os.PathLike[str] | None = None,
    ) -> None:
        self._settings = _settings(
            bundles=[Path(bundle)],
            engine=engine,
            provider=provider,
            threads=threads,
            long_documents=long_documents,
            memory_budget_mib=memory_budget_mib,
            max_tokens=max_tokens,
            spill=None if spill is None else Path(spill),
        )
        self._loaded: OfflineClassifier | None = OfflineClassifier(self._settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of the model, after the calls that run now."""
        self._loaded = None

    @property
    def bundle(self) -> str:
        """Digest of the bundle."""
        return self._open().bundle.digest

    @property
    def heads(self) -> Mapping[str, AnyHead]:
        """Head of each output: its task and its names."""
        return self._open().bundle.manifest.heads

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self,
        documents: str,
        *,
        inputs: Fields | None = None,
        evidence: int = 0,
        evidence_tokens: int | None = None,
        evidence_check: int = 0,
        explain: Names = (),
        outputs: Names = (),
    ) -> Result: ...

    @overload
    def __call__(
        self,
        documents: Iterable[Document],
        *,
        inputs: Iterable[Fields] | None = None,
        evidence: int = 0,
        evidence_tokens: int | None = None,
        evidence_check: int = 0,
        explain: Names = (),
        outputs: Names = (),
        progress: bool | None = None,
    ) -> list[Result]: ...

    def __call__(
        self,
        documents: str | Iterable[Document],
        *,
        inputs: Fields | Iterable[Fields] | None = None,
        evidence: int = 0,
        evidence_tokens: int | None = None,
        evidence_check: int = 0,
        explain: Names = (),
        outputs: Names = (),
        progress: bool | None = None,
    ) -> Result | list[Result]:
        """Classify one text, or any number of documents.

        Args:
            documents: one text, or several documents: texts, pairs of texts as tuples, token ids,
                or arrays of features.
            inputs: the extra inputs by name, numbers, lists or arrays: a mapping for one text, one
                mapping for each of several documents.
            evidence: maximum passages of each document that support its label; with ``explain``
                or ``evidence_check``, 5 in place of 0.
            evidence_tokens: maximum tokens of a passage; None for 64.
            evidence_check: number of passages, up to 5, whose document runs again without them.
            explain: labels or values, ``NAME`` or ``OUTPUT:NAME``, that the passages support in
                place of the largest logit; or outputs, for the labels or values of their answers.
            outputs: the outputs to answer; all by default.
            progress: whether to show a bar on standard error; by default on a terminal or in a
                notebook, after two seconds.

        Returns:
            The answer, or the answers in the order of the documents.

        Raises:
            AftexportError: if a document has no answer; the error names it by its index.
            TypeError: if ``documents`` is a single array, or is not iterable.
        """
        options = _options(evidence, evidence_tokens, evidence_check, explain, outputs)
        if isinstance(documents, str):
            only = None if inputs is None else [inputs]
            return _result(0, next(self._outcomes([documents], only, options)))
        total = len(documents) if isinstance(documents, Sized) else None
        with document_bar(total, progress) as advance:
            outcomes = self._outcomes(documents, inputs, options, advance)
            return [_result(index, outcome) for index, outcome in enumerate(outcomes)]

    def infer_each(
        self,
        documents: Iterable[Document],
        *,
        inputs: Iterable[Fields] | None = None,
        evidence: int = 0,
        evidence_tokens: int | None = None,
        evidence_check: int = 0,
        explain: Names = (),
        outputs: Names = (),
    ) -> Iterator[Result | AftexportError]:
        """Classify any number of documents; one that fails does not stop the others.

        Args:
            documents: see ``Predictor.__call__``; they are consumed as needed, up to some
                thousands ahead of the answers.
            inputs: the extra inputs of each document.
            evidence, evidence_tokens, evidence_check, explain, outputs: see
                ``Predictor.__call__``.

        Yields:
            A result for each document, in order, or the error of that document.
        """
        options = _options(evidence, evidence_tokens, evidence_check, explain, outputs)
        for outcome in self._outcomes(documents, inputs, options):
            yield _read(outcome.result) if outcome.result is not None else _error(outcome)

    def _open(self) -> OfflineClassifier:
        if self._loaded is None:
            raise UsageError("The predictor is closed.", "Make a new one.")
        return self._loaded

    def _outcomes(
        self,
        documents: Iterable[Document],
        inputs: Any,
        options: AnswerOptions,
        on_done: Callable[[int], None] | None = None,
    ) -> Iterator[Outcome]:
        loaded = self._open()
        if isinstance(documents, str | bytes | np.ndarray | Mapping):
            raise TypeError(
                f"expected several documents, got {type(documents).__name__}; "
                "put one document into a list"
            )
        if isinstance(inputs, Mapping):
            raise TypeError("expected a list with one mapping for each document, got one mapping")
        return loaded.answer(
            map(checked_document, documents),
            None if inputs is None else map(plain_fields, inputs),
            finish=partial(_finish, loaded, options),
            wanted=options.wanted(loaded.bundle.manifest),
            on_done=on_done,
        )


class _Arguments(Settings):
    """The settings of a predictor: the server's, without its variables and its file."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the arguments as the only source."""
        return (init_settings,)


def _settings(**arguments: Any) -> Settings:
    try:
        return _Arguments(**arguments)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise UsageError(f"{name}: {message}.", "Give another value.") from error


def _options(
    evidence: int, tokens: int | None, checks: int, explain: Names, outputs: Names
) -> AnswerOptions:
    if evidence < 0:
        raise UsageError(f"evidence must be at least 0, got {evidence}.", "Give 0 for none.")
    if tokens is not None and tokens < 1:
        raise UsageError(f"evidence_tokens must be at least 1, got {tokens}.", "Give 64, or more.")
    if not 0 <= checks <= MAX_CHECKS:
        raise UsageError(
            f"evidence_check must be from 0 to {MAX_CHECKS}, got {checks}.", "Give 0 for none."
        )
    return AnswerOptions(evidence, _listed(explain), _listed(outputs), tokens or 0, checks)


def _listed(names: Names) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _finish(
    loaded: OfflineClassifier,
    options: AnswerOptions,
    one: TokenizedDocument,
    answer: Answer,
    timings: Timings,
) -> DocumentResult:
    """Return the server's answer for a document."""
    policy = loaded.classifier.policy
    result = document_answer(loaded.bundle, policy, one, answer, timings).complete()
    if options.spans:
        explained = explain_answer(
            loaded.classifier, one.document, answer, first=one.first, options=options
        )
        if options.checks:
            loaded.run_again(check(one, answer, explained, options))
        add_evidence(result, answer, explained.evidence, is_chosen=bool(options.explain))
    return result


def _result(index: int, outcome: Outcome) -> Result:
    """Return the result of a document, or raise its error with the index of the document."""
    if outcome.result is None:
        error = _error(outcome)
        raise type(error)(f"document {index}: {error.problem}", error.remedy) from error
    return _read(outcome.result)


def _read(result: DocumentResult) -> Result:
    return Result.read(result.model_dump(mode="json", exclude_none=True))


def _error(outcome: Outcome) -> AftexportError:
    assert outcome.error is not None  # an outcome has a result or an error
    return outcome.error
