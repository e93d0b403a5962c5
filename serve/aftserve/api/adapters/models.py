"""``GET /v1/models`` in the formats of OpenAI and of TypeSafe.

Both lists are in one answer, because both have the same address. A client ignores the other list.

https://github.com/openai/openai-python (types/model.py)
https://github.com/typesafe-ai/typesafe-sdk-python (_schemas/models.py)
"""

from collections.abc import Sequence
from typing import Literal

from fastapi import APIRouter, params
from pydantic import BaseModel, Field

from aftserve.api.adapters.adapter import Adapter
from aftserve.api.adapters.model_choice import check_model
from aftserve.api.adapters.openai_errors import OpenAIError, error_body
from aftserve.api.error_responses import GUARDED, responses
from aftserve.service import Service


class Model(BaseModel):
    """The model, as OpenAI describes one."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time at which the bundle was loaded.")
    owned_by: Literal["aftserve"] = "aftserve"


class ModelMetadata(BaseModel):
    """The model, as TypeSafe describes one."""

    name: str
    description: str = Field(description="The outputs, with the task of each.")
    release_date: str = Field(description="Day on which the bundle was loaded.")


class ModelList(BaseModel):
    """The only model of the server."""

    object: Literal["list"] = "list"
    data: list[Model]
    models: list[ModelMetadata]


def create(service: Service, guards: Sequence[params.Depends]) -> Adapter:
    """Build the endpoints.

    Args:
        service: the service with the model.
        guards: checks of a request.
    """
    problems = responses(OpenAIError)
    unknown = {"model": OpenAIError, "description": "The model is unknown."}
    router = APIRouter(
        dependencies=guards,
        tags=["OpenAI"],
        responses={status: problems[status] for status in GUARDED},
    )

    def model() -> Model:
        created = int(service.active.since.timestamp())
        return Model(id=service.settings.served_name, created=created)

    @router.get("/v1/models")
    async def models() -> ModelList:
        """The only model of the server."""
        active = service.active
        heads = active.bundle.manifest.heads.items()
        metadata = ModelMetadata(
            name=service.settings.served_name,
            description=", ".join(f"{name}: {head.task}" for name, head in heads),
            release_date=active.since.date().isoformat(),
        )
        return ModelList(data=[model()], models=[metadata])

    @router.get("/v1/models/{name}", responses={404: unknown})
    async def one_model(name: str) -> Model:
        """The model."""
        check_model(name, service)
        return model()

    return Adapter(router, error_body)
