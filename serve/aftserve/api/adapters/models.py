"""``GET /v1/models`` in the formats of OpenAI and of TypeSafe, and one model also in KServe's.

All have the same addresses, so one answer has the fields of each. A client ignores the others.

https://github.com/openai/openai-python (types/model.py)
https://github.com/typesafe-ai/typesafe-sdk-python (_schemas/models.py)
https://kserve.github.io/website/docs/concepts/architecture/data-plane/v1-protocol
"""

from collections.abc import Sequence
from typing import Literal

from fastapi import APIRouter, Request, params
from pydantic import BaseModel, Field

from aftserve.api.adapters.adapter import Adapter, OpenAIError, error_body
from aftserve.api.error_responses import GUARDED, responses
from aftserve.api.model_choice import NamedModel, visible
from aftserve.serving.repository import ModelRepository
from aftserve.serving.service import Service


class Model(BaseModel):
    """A model, as OpenAI and KServe describe one."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time at which the bundle was loaded.")
    owned_by: Literal["aftserve"] = "aftserve"
    name: str
    ready: bool = Field(description="Whether it takes requests.")


class ModelMetadata(BaseModel):
    """A model, as TypeSafe describes one."""

    name: str
    description: str = Field(description="The outputs, with the task of each.")
    release_date: str = Field(description="Day on which the bundle was loaded.")


class ModelList(BaseModel):
    """The models of the server."""

    object: Literal["list"] = "list"
    data: list[Model]
    models: list[ModelMetadata]


def create(models: ModelRepository, guards: Sequence[params.Depends]) -> Adapter:
    """Build the endpoints."""
    problems = responses(OpenAIError)
    router = APIRouter(
        dependencies=guards,
        tags=["OpenAI"],
        responses={status: problems[status] for status in GUARDED},
    )

    @router.get("/v1/models")
    async def list_models(request: Request) -> ModelList:
        """The models of the server; below /models/NAME only that one."""
        found = visible(request)
        return ModelList(data=[*map(_model, found)], models=[*map(_metadata, found)])

    @router.get("/v1/models/{name}", responses={404: problems[404]})
    async def one_model(service: NamedModel) -> Model:
        """One model."""
        return _model(service)

    return Adapter(router, error_body)


def _model(service: Service) -> Model:
    return Model(
        id=service.name,
        created=int(service.active.since.timestamp()),
        name=service.name,
        ready=service.health.ready,
    )


def _metadata(service: Service) -> ModelMetadata:
    active = service.active
    heads = active.bundle.manifest.heads.items()
    return ModelMetadata(
        name=service.name,
        description=", ".join(f"{name}: {head.task}" for name, head in heads),
        release_date=active.since.date().isoformat(),
    )
