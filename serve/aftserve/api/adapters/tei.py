"""``POST /predict``, ``/embed`` and ``/rerank`` of text-embeddings-inference.

https://huggingface.github.io/text-embeddings-inference
"""

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import numpy as np
from fastapi import APIRouter, Request, params
from pydantic import BaseModel, ConfigDict, Field

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftexport.heads import FeatureExtraction, Head
from aftserve.api.adapters.adapter import (
    WITH_LABELS,
    Adapter,
    Output,
    answer_by_output,
    check_count,
    document_of,
    documents_of,
    heads_for_documents,
    is_document,
    put_outputs,
)
from aftserve.api.adapters.rerank import put_rankers, rank, rankers
from aftserve.api.document_answers import DeadlineSeconds
from aftserve.api.error_responses import responses
from aftserve.api.model_choice import ChosenModel
from aftserve.api.request_body import (
    TEXT_SCHEMA,
    Schema,
    any_of,
    body_schema,
    document_schemas,
    put_body,
    read_json,
    several,
)
from aftserve.errors import RefusedError
from aftserve.model.classifier import Classifier
from aftserve.model.documents import DocumentAnswer
from aftserve.serving.repository import ModelRepository
from aftserve.types import Document, TextPair

PREDICT, EMBED, RERANK = "/predict", "/embed", "/rerank"
ErrorType = Literal["unhealthy", "backend", "overloaded", "validation"]


class ModelKindError(RefusedError):
    """The model does not give answers of this kind; text-embeddings-inference sends 424 too."""

    status = 424


class _Request(BaseModel):
    """The fields of every request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    truncate: bool | None = Field(
        None, description="Ignored: --long-documents of the server decides, never a request."
    )
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = Field(
        None, description="Ignored, as truncate."
    )


class PredictRequest(_Request):
    """Documents to classify."""

    inputs: Any = Field(
        description="One document, as a text, `[text]` or token ids; or a list of `[text]` or "
        "token ids. For a model of pairs it is `[text, text_pair]`, or a list of these."
    )
    raw_scores: bool = Field(False, description="Whether scores are the logits.")


class Prediction(BaseModel):
    """A label and its score."""

    score: float
    label: str


class EmbedRequest(_Request):
    """Documents to embed."""

    inputs: Any = Field(description="A text, token ids, or a list of either.")
    normalize: bool | None = Field(None, description="Whether vectors have length 1; true if null.")
    prompt_name: None = Field(None, description="The model has no prompts.")
    dimensions: None = Field(None, description="The vectors have all their dimensions.")


class RerankRequest(_Request):
    """A query, and the texts to rank for it."""

    query: str
    texts: list[str] = Field(min_length=1, fail_fast=True)
    raw_scores: bool = Field(False, description="Whether scores are the logits.")
    return_text: bool = Field(False, description="Whether the answer has the texts.")


class Rank(BaseModel):
    """The relevance of a text."""

    index: int = Field(description="Place of the text in the request.")
    text: str | None = None
    score: float = Field(description="Sigmoid of the logit, or the logit for `raw_scores`.")


class TeiError(BaseModel):
    """The problem of a request, and its remedy."""

    error: str
    error_type: ErrorType


def create(models: ModelRepository, guards: Sequence[params.Depends]) -> Adapter:
    """Build the endpoints."""
    other_kind = {"model": TeiError, "description": "The model has no such output."}
    router = APIRouter(
        dependencies=guards,
        tags=["text-embeddings-inference"],
        responses={**responses(TeiError), 424: other_kind},
    )

    @router.post(PREDICT, openapi_extra=body_schema(PredictRequest))
    async def predict(
        request: Request,
        service: ChosenModel,
        output: Output = None,
        deadline_seconds: DeadlineSeconds = None,
    ) -> list[Prediction] | list[list[Prediction]]:
        """Classify documents; the most probable label is first."""
        service.check_open()
        _labelled(service.active.bundle.manifest)  # another model is refused before the body
        body = await read_json(request, PredictRequest, max_entries={})
        documents, is_one = _predicted_documents(body.inputs, service.settings.max_documents)
        name, answers = await answer_by_output(
            request, service, documents, _labelled, output, deadline_seconds
        )
        rows = [_predictions(one, name, raw=body.raw_scores) for one in answers]
        return rows[0] if is_one else rows

    @router.post(EMBED, openapi_extra=body_schema(EmbedRequest))
    async def embed(
        request: Request,
        service: ChosenModel,
        output: Output = None,
        deadline_seconds: DeadlineSeconds = None,
    ) -> list[list[float]]:
        """Return a vector of each document."""
        service.check_open()
        _embeddings(service.active.bundle.manifest)  # another model is refused before the body
        body = await read_json(request, EmbedRequest, max_entries={})
        documents = documents_of(body.inputs, "inputs", service.settings.max_documents)
        name, answers = await answer_by_output(
            request, service, documents, _embeddings, output, deadline_seconds
        )
        return [_vector(one, name, normalize=body.normalize is not False) for one in answers]

    @router.post(RERANK, openapi_extra=body_schema(RerankRequest), response_model_exclude_none=True)
    async def rerank(
        request: Request,
        service: ChosenModel,
        output: Output = None,
        deadline_seconds: DeadlineSeconds = None,
    ) -> list[Rank]:
        """Rank texts by their relevance for a query."""
        service.check_open()
        _rankers(service.active.bundle.manifest)  # another model is refused before the body
        limits = {"texts": service.settings.max_documents}
        body = await read_json(request, RerankRequest, max_entries=limits)
        pairs = [TextPair(body.query, text) for text in body.texts]
        name, answers = await answer_by_output(
            request, service, pairs, _rankers, output, deadline_seconds
        )
        return [
            Rank(
                index=one.index,
                text=body.texts[one.index] if body.return_text else None,
                score=one.logit if body.raw_scores else one.score,
            )
            for one in rank(answers, name)
        ]

    return Adapter(router, error_body, _describe)


def _describe(document: Schema, classifier: Classifier | None, names: Sequence[str]) -> None:
    """Put the limits of a model into an OpenAPI document."""
    forms = document_schemas(classifier)
    lists = [
        {**several(TEXT_SCHEMA), "maxItems": 1} if one == TEXT_SCHEMA else one for one in forms
    ]
    if classifier is not None and classifier.manifest.text_pairs:
        lists.append({**several(TEXT_SCHEMA), "minItems": 2, "maxItems": 2})
    singles = [TEXT_SCHEMA, *lists] if TEXT_SCHEMA in forms else lists
    predicted = [*singles, several(any_of(lists))] if lists else []
    put_body(document, PredictRequest, {"inputs": any_of(predicted)})
    put_body(document, EmbedRequest, {"inputs": any_of([*forms, *map(several, forms)])})
    put_outputs(document, PREDICT, classifier, *WITH_LABELS)
    put_outputs(document, EMBED, classifier, FeatureExtraction)
    put_body(document, RerankRequest, {"query": TEXT_SCHEMA, "texts": several(TEXT_SCHEMA)})
    put_rankers(document, RERANK, classifier)


def _labelled(manifest: Manifest) -> list[str]:
    return _names(manifest, WITH_LABELS, "labels", "a sequence classification model")


def _embeddings(manifest: Manifest) -> list[str]:
    return _names(manifest, (FeatureExtraction,), "a vector", "an embedding model")


def _rankers(manifest: Manifest) -> list[str]:
    return rankers(manifest) or _refuse(manifest, "one logit of a pair", "a reranker")


def _names(manifest: Manifest, kinds: tuple[type[Head], ...], answers: str, kind: str) -> list[str]:
    return heads_for_documents(manifest, *kinds) or _refuse(
        manifest, f"{answers} of a document", kind
    )


def _refuse(manifest: Manifest, answers: str, kind: str) -> NoReturn:
    tasks = ", ".join(f"{name} ({head.task})" for name, head in manifest.heads.items())
    raise ModelKindError(
        f"Expected {kind}, with {answers}, got a model with the outputs {tasks}.",
        "Send its documents to /infer.",
    )


def _predicted_documents(inputs: Any, max_documents: int) -> tuple[list[Document], bool]:
    """Return the documents of ``inputs``, and whether they are one document by itself."""
    is_list = isinstance(inputs, list | np.ndarray)
    if not is_list or not len(inputs) or is_document(inputs):
        return documents_of(inputs, "inputs", max_documents), True
    if isinstance(inputs[0], str):
        return [_texts(inputs, ("inputs",))], True
    check_count(len(inputs), "inputs", max_documents)
    return [_texts(one, ("inputs", index)) for index, one in enumerate(inputs)], False


def _texts(given: Any, place: Sequence[str | int]) -> Document:
    """Return the document of a list with one text, or a pair, or of token ids."""
    if isinstance(given, list) and given and isinstance(given[0], str):
        if not all(isinstance(text, str) for text in given) or len(given) > 2:
            raise InputError(
                f"{'.'.join(map(str, place))} must have one text, or two of a pair, got "
                f"{len(given)} values.",
                "Send several documents as a list of lists: [[text], [text]].",
            )
        return TextPair(*given) if len(given) == 2 else given[0]
    if isinstance(given, str):
        raise InputError(
            f"{'.'.join(map(str, place))} must be a list with one text, got a string.",
            "Send several documents as a list of lists: [[text], [text]].",
        )
    return document_of(given, place)


def _predictions(answer: DocumentAnswer, name: str, *, raw: bool) -> list[Prediction]:
    scores: dict[str, float] = answer.of_head(name).scores
    if raw:
        names = answer.tokens.heads[name].logit_names
        scores = dict(zip(names, answer.logits[name].tolist(), strict=True))
    rows = [Prediction(score=score, label=label) for label, score in scores.items()]
    # Of equal scores the last label is first, as in text-embeddings-inference.
    return sorted(rows, key=lambda one: one.score)[::-1]


def _vector(answer: DocumentAnswer, name: str, *, normalize: bool) -> list[float]:
    head = answer.tokens.heads[name].model_copy(update={"normalize": normalize})
    vector: list[float] = head.scores(answer.logits[name]).tolist()
    return vector


def error_body(error: Exception, status: int, message: str) -> dict[str, Any]:
    """Return an error in the format of text-embeddings-inference."""
    kinds: dict[int, ErrorType] = {
        424: "backend", 429: "overloaded", 500: "backend", 503: "unhealthy", 504: "overloaded",
        507: "backend",
    }  # fmt: skip
    return TeiError(error=message, error_type=kinds.get(status, "validation")).model_dump()
