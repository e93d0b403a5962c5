"""``POST /v2/rerank`` as Cohere serves it, and ``/v1/rerank`` as Jina and vLLM do.

https://docs.cohere.com/reference/rerank
https://docs.vllm.ai/en/latest/models/pooling_models/scoring.html
"""

from collections.abc import Sequence

from fastapi import APIRouter, Request, params
from pydantic import BaseModel, ConfigDict, Field

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftserve.api.adapters.adapter import Adapter, Output, answer_by_output
from aftserve.api.adapters.rerank import put_rankers, rank, rankers
from aftserve.api.document_answers import DeadlineSeconds
from aftserve.api.error_responses import responses
from aftserve.api.model_choice import requested
from aftserve.api.request_body import (
    TEXT_SCHEMA,
    Schema,
    body_schema,
    name_schema,
    put_body,
    read_json,
    several,
)
from aftserve.model.classifier import Classifier
from aftserve.serving.repository import ModelRepository
from aftserve.types import TextPair

PATHS = ("/v2/rerank", "/v1/rerank")
"""The path of Cohere, and that of Jina and vLLM."""


class CohereRerankRequest(BaseModel):
    """A query, and the documents to rank for it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: str
    documents: list[str] = Field(min_length=1, fail_fast=True)
    model: str | None = Field(None, description="Name of the model.")
    top_n: int | None = Field(None, ge=1, description="Number of results; all if null.")
    return_documents: bool = Field(False, description="Whether results have the documents.")
    max_tokens_per_doc: None = Field(None, description="A request cannot cut documents.")
    priority: int = Field(0, ge=0, le=0, description="Every request has the same priority.")


class RerankDocument(BaseModel):
    """A document of the request."""

    text: str


class RerankResult(BaseModel):
    """The relevance of one document."""

    index: int = Field(description="Place of the document in the request.")
    relevance_score: float = Field(description="Sigmoid of the logit.")
    document: RerankDocument | None = None


class RerankResponse(BaseModel):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: dict[str, int] = Field(description="`total_tokens`, as Jina and vLLM give them.")
    meta: dict[str, dict[str, int]] = Field(description="`tokens`, as Cohere gives them.")


class CohereError(BaseModel):
    """The problem of a request, and its remedy."""

    message: str


def create(models: ModelRepository, guards: Sequence[params.Depends]) -> Adapter:
    """Build the endpoints."""
    router = APIRouter(dependencies=guards, tags=["Cohere"])

    async def rerank(
        request: Request, output: Output = None, deadline_seconds: DeadlineSeconds = None
    ) -> RerankResponse:
        """Rank documents by their relevance for a query."""
        models.check_open()
        limits = {"documents": models.settings.max_documents}
        body = await read_json(request, CohereRerankRequest, max_entries=limits)
        service = await requested(request, body.model)
        service.check_open()
        pairs = [TextPair(body.query, one) for one in body.documents]
        name, answers = await answer_by_output(
            request, service, pairs, _rankers, output, deadline_seconds
        )
        ranked = rank(answers, name)
        texts = [RerankDocument(text=one) for one in body.documents * body.return_documents]
        results = [
            RerankResult(
                index=one.index,
                relevance_score=one.score,
                document=texts[one.index] if texts else None,
            )
            for one in ranked[: body.top_n]
        ]
        tokens = sum(answer.result.tokens_used for answer in answers)
        return RerankResponse(
            id=f"rerank-{request.state.fields['request_id']}",
            model=service.name,
            results=results,
            usage={"total_tokens": tokens},
            meta={"tokens": {"input_tokens": tokens}},
        )

    for path in PATHS:
        router.post(
            path,
            response_model_exclude_none=True,
            responses=responses(CohereError),
            openapi_extra=body_schema(CohereRerankRequest),
        )(rerank)

    def describe(document: Schema, classifier: Classifier | None, names: Sequence[str]) -> None:
        texts = several(TEXT_SCHEMA)
        changes = {"query": TEXT_SCHEMA, "documents": texts, "model": name_schema(names, None)}
        put_body(document, CohereRerankRequest, changes)
        for path in PATHS:
            put_rankers(document, path, classifier)

    return Adapter(
        router, lambda error, status, message: CohereError(message=message).model_dump(), describe
    )


def _rankers(manifest: Manifest) -> list[str]:
    if names := rankers(manifest):
        return names
    raise InputError(
        "Expected a model of pairs with one logit, got one with the outputs "
        f"{', '.join(manifest.heads)}.",
        "Send its documents to /infer.",
    )
