"""The addresses that platforms call: KServe's protocol of version 1, and SageMaker's container.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v1-protocol
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response, params
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from aftexport.errors import InputError
from aftserve.api.adapters.adapter import Adapter, validated
from aftserve.api.document_answers import DeadlineSeconds, answer_documents, deadline_of
from aftserve.api.error_responses import responses
from aftserve.api.infer import INFER, Options, infer, inline_tokens, respond
from aftserve.api.model_choice import OPEN, NamedModel, readiness
from aftserve.api.request_body import (
    COMPONENTS,
    Schema,
    any_of,
    body_schema,
    document_schemas,
    kind_of,
    put_body,
    read_json,
    several,
)
from aftserve.model.classifier import Classifier
from aftserve.schemas import DocumentRequest, DocumentResult, Rows, Status
from aftserve.serving.repository import ModelRepository

PREDICT = "/v1/models/{name}:predict"
PING, INVOCATIONS = "/ping", "/invocations"
_DOCUMENT = TypeAdapter(DocumentRequest)


class InstancesRequest(BaseModel):
    """Documents to classify."""

    model_config = ConfigDict(extra="forbid")

    instances: Rows = Field(
        description="Documents, each a text, its token ids, its features, or an object with the "
        "fields of a line of /infer."
    )


class Predictions(BaseModel):
    """The answers for several documents, in the order of the request."""

    predictions: list[DocumentResult]


class KServeProblem(BaseModel):
    """The problem of a request, and its remedy."""

    error: str


def create_kserve(models: ModelRepository, guards: Sequence[params.Depends]) -> Adapter:
    """Build the endpoint of KServe."""
    router = APIRouter(dependencies=guards, tags=["KServe"], responses=responses(KServeProblem))

    @router.post(PREDICT, response_model=Predictions, openapi_extra=body_schema(InstancesRequest))
    async def predict(
        request: Request,
        service: NamedModel,
        options: Options,
        deadline_seconds: DeadlineSeconds = None,
    ) -> Response:
        """Classify documents; each prediction is an answer of /infer."""
        service.check_open()
        inline = inline_tokens(service, options)  # before the body is read
        deadline = deadline_of(request, deadline_seconds, service.settings.deadline_seconds)
        limits = {"instances": service.settings.max_documents}
        body = await read_json(request, InstancesRequest, max_entries=limits)
        found = _documents(body.instances)
        answers = await answer_documents(
            request,
            service,
            [one.document for one in found],
            deadline,
            given=[one.inputs or {} for one in found],
            options=options,
            inline=inline,
        )
        return await respond(request, service, answers, deadline, field="predictions")

    def describe(document: Schema, classifier: Classifier | None, names: Sequence[str]) -> None:
        forms = [*document_schemas(classifier), {"$ref": f"{COMPONENTS}DocumentRequest"}]
        put_body(document, InstancesRequest, {"instances": several(any_of(forms))})

    return Adapter(
        router,
        lambda error, status, message: KServeProblem(error=message).model_dump(),
        describe,
    )


def create_sagemaker(models: ModelRepository, guards: Sequence[params.Depends]) -> Adapter:
    """Build the endpoints of a container of SageMaker."""
    router = APIRouter(tags=["SageMaker"])
    router.add_api_route(INVOCATIONS, infer, methods=["POST"], dependencies=guards, **INFER)

    @router.get(PING, dependencies=OPEN, responses={503: {"model": Status}})
    async def ping(request: Request, response: Response) -> Status:
        """The server takes requests, as /readyz."""
        is_ready, status = readiness(request)
        response.status_code = 200 if is_ready else 503
        return Status(status=status)

    def describe(document: Schema, classifier: Classifier | None, names: Sequence[str]) -> None:
        there = document["paths"]["/infer"]["post"]
        document["paths"][INVOCATIONS]["post"]["requestBody"] = there["requestBody"]

    return Adapter(router, describe=describe, probes=[PING])


def _documents(instances: Any) -> list[DocumentRequest]:
    """Return the documents of the field ``instances``."""
    if not len(instances):
        raise InputError("instances must have a document, got none.", "Send at least one.")
    return [
        validated(_DOCUMENT, _fields(one, index), ("instances", index))
        for index, one in enumerate(instances)
    ]


def _fields(instance: Any, index: int) -> dict[str, Any]:
    """Return the fields of an instance, which may be the value of its only field."""
    match instance:
        case dict():
            return instance
        case str():
            return {"text": instance}
        case list() | np.ndarray():
            is_features = len(instance) > 0 and isinstance(instance[0], list | np.ndarray)
            return {"input_features" if is_features else "input_ids": instance}
    raise InputError(
        f"instances.{index} must be a text, token ids, features or an object, got "
        f"{'a number' if isinstance(instance, np.number) else kind_of(instance)}.",
        "Put the ids of each document in their own list.",
    )
