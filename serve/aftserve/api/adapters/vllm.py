"""``POST /classify`` as vLLM and SGLang serve it.

https://docs.vllm.ai/en/latest/models/pooling_models/classify.html
https://docs.sglang.io/supported_models/classify_models.html
"""

import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, params
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftserve.api.adapters.adapter import (
    WITH_LABELS,
    Adapter,
    Output,
    answer_by_output,
    documents_of,
    heads_for_documents,
    put_outputs,
)
from aftserve.api.document_answers import DeadlineSeconds
from aftserve.api.error_responses import responses
from aftserve.api.model_choice import requested
from aftserve.api.request_body import (
    Schema,
    any_of,
    body_schema,
    document_schemas,
    name_schema,
    put_body,
    read_json,
    several,
)
from aftserve.model.classifier import Classifier
from aftserve.model.documents import DocumentAnswer
from aftserve.serving.repository import ModelRepository

PATHS = ("/classify", "/v1/classify")
"""The path of vLLM, and that of SGLang."""


def _check_true(given: bool) -> bool:
    if not given:
        raise ValueError("the tokenizer adds its special tokens, leave this field out")
    return given


OnlyTrue = Annotated[bool, AfterValidator(_check_true), WithJsonSchema({"const": True})]
"""True; a Literal would also take 1."""


class ClassificationRequest(BaseModel):
    """Documents to classify."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: Any = Field(description="A text, token ids, or a list of either.")
    model: str | None = Field(None, description="Name of the model.")
    use_activation: bool | None = Field(
        None, description="Whether `probs` has probabilities; false for the logits."
    )
    request_id: str | None = Field(None, description="Name of the request, for `id`.")
    rid: str | None = Field(None, description="The same, as SGLang names it.")
    user: str | None = Field(None, description="Ignored.")
    priority: int = Field(0, ge=0, le=0, description="Every request has the same priority.")
    add_special_tokens: OnlyTrue = Field(True, description="The tokenizer decides.")
    truncate_prompt_tokens: None = Field(None, description="A request cannot cut documents.")


class ClassificationData(BaseModel):
    """The classes of one document."""

    index: int
    label: str = Field(
        description="Label of the answer; of independent labels the most probable one."
    )
    probs: list[float]
    num_classes: int


class UsageInfo(BaseModel):
    """The number of tokens that the model saw."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassificationResponse(BaseModel):
    """The classes of the documents."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassificationData]
    usage: UsageInfo


class ErrorInfo(BaseModel):
    """An error."""

    message: str
    type: str
    param: None = None
    code: int = Field(description="Status of the response.")


class ErrorResponse(BaseModel):
    """The problem of a request, and its remedy."""

    error: ErrorInfo


def create(models: ModelRepository, guards: Sequence[params.Depends]) -> Adapter:
    """Build the endpoints."""
    router = APIRouter(dependencies=guards, tags=["vLLM"])

    async def classify(
        request: Request, output: Output = None, deadline_seconds: DeadlineSeconds = None
    ) -> ClassificationResponse:
        """Classify documents: texts, or token ids."""
        models.check_open()
        body = await read_json(request, ClassificationRequest, max_entries={})
        service = await requested(request, body.model)
        service.check_open()
        documents = documents_of(body.input, "input", service.settings.max_documents)
        name, answers = await answer_by_output(
            request, service, documents, _heads, output, deadline_seconds
        )
        given = body.request_id or body.rid or request.state.fields["request_id"]
        return _response(answers, name, f"classify-{given}", body, service.name)

    for path in PATHS:
        router.post(
            path,
            responses=responses(ErrorResponse),
            openapi_extra=body_schema(ClassificationRequest),
        )(classify)

    def describe(document: Schema, classifier: Classifier | None, names: Sequence[str]) -> None:
        forms = document_schemas(classifier)
        field = any_of([*forms, *map(several, forms)])
        changes = {"input": field, "model": name_schema(names, None)}
        put_body(document, ClassificationRequest, changes)
        for path in PATHS:
            put_outputs(document, path, classifier, *WITH_LABELS)

    return Adapter(router, error_body, describe)


def _heads(manifest: Manifest) -> list[str]:
    if names := heads_for_documents(manifest, *WITH_LABELS):
        return names
    raise InputError(
        "Expected a model with labels of documents, got one with the outputs "
        f"{', '.join(manifest.heads)}.",
        "Send its documents to /infer.",
    )


def _response(
    answers: Sequence[DocumentAnswer],
    name: str,
    response_id: str,
    body: ClassificationRequest,
    model: str,
) -> ClassificationResponse:
    tokens = sum(answer.result.tokens_used for answer in answers)
    return ClassificationResponse(
        id=response_id,
        created=int(time.time()),
        model=model,
        data=[_data(i, one, name, body.use_activation) for i, one in enumerate(answers)],
        usage=UsageInfo(prompt_tokens=tokens, total_tokens=tokens),
    )


def _data(
    index: int, answer: DocumentAnswer, name: str, use_activation: bool | None
) -> ClassificationData:
    content = answer.of_head(name)
    scores: dict[str, float] = content.scores
    # An answer of independent labels has no single label.
    label = getattr(content, "label", None) or max(scores, key=lambda one: scores[one])
    probs = [*scores.values()] if use_activation is not False else answer.logits[name].tolist()
    return ClassificationData(index=index, label=label, probs=probs, num_classes=len(scores))


def error_body(error: Exception, status: int, message: str) -> dict[str, Any]:
    """Return an error in vLLM's format."""
    names = {404: "NotFoundError", 500: "InternalServerError"}
    names |= dict.fromkeys((400, 405, 408, 413, 415, 422), "BadRequestError")
    known = [one.phrase for one in HTTPStatus if one == status]
    kind = names.get(status) or (known or ["Error"])[0]
    info = ErrorInfo(message=message, type=kind, code=status)
    return ErrorResponse(error=info).model_dump()
