"""The endpoints of the extension for model repositories, below ``/v2/repository``.

https://github.com/triton-inference-server/server (docs/protocol/extension_model_repository.md)
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response, params
from pydantic import BaseModel

from aftexport.errors import InputError
from aftserve.api.error_responses import responses
from aftserve.api.model_choice import check_name, visible_states
from aftserve.api.open_inference.descriptions import VERSION
from aftserve.api.open_inference.schemas import (
    ModelIndex,
    ProtocolProblem,
    RepositoryIndexRequest,
    RepositoryLoadRequest,
    RepositoryUnloadRequest,
)
from aftserve.api.request_body import checked, parse_json, receive
from aftserve.serving.repository import ModelRepository, ModelState

EXTENSION = "model_repository"
"""Name of the extension in the metadata of the server."""
_DEPENDENTS = "unload_dependents"
# Complete paths, as those of ``aftserve.api.open_inference.routes``.
_INDEX = "/v2/repository/index"
_MODEL = "/v2/repository/models/{name}"
_TAGS: list[Any] = ["Open Inference Protocol"]
_BODY_STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 429)
Body = TypeVar("Body", bound=BaseModel)


def create_router(guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoint that lists the models."""
    router = APIRouter(tags=_TAGS, dependencies=guards, responses=_problems(_BODY_STATUSES))

    @router.post(_INDEX, openapi_extra=_body_schema(RepositoryIndexRequest))
    async def index(request: Request) -> list[ModelIndex]:
        """The models that are loaded or can be; below /models/NAME only that one."""
        body = await _read(request, RepositoryIndexRequest)
        return index_of(await visible_states(request), ready=body.ready)

    return router


def create_admin_router(models: ModelRepository, guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoints that load and unload models; ``guards`` require an admin key."""
    problems = _problems((*_BODY_STATUSES, 503))
    problems[403] = {"model": ProtocolProblem, "description": "The API key is not marked admin."}
    router = APIRouter(tags=_TAGS, dependencies=guards, responses=problems)
    refused = {"model": ProtocolProblem, "description": "The bundle cannot be used."}

    @router.post(
        f"{_MODEL}/load",
        response_class=Response,
        responses={409: refused},
        openapi_extra=_body_schema(RepositoryLoadRequest),
    )
    async def load(request: Request, name: str) -> Response:
        """Load a model, or load the bundle of a loaded model again.

        If the bundle cannot be used, the previous one answers on. The API key must be marked admin.
        """
        check_name(request, name)
        body = await _read(request, RepositoryLoadRequest)
        check_load(body.parameters or {})
        await models.load(name)
        return Response()

    @router.post(
        f"{_MODEL}/unload",
        response_class=Response,
        openapi_extra=_body_schema(RepositoryUnloadRequest),
    )
    async def unload(request: Request, name: str) -> Response:
        """Refuse new requests for a model, answer the accepted ones, and free its memory.

        The API key must be marked admin.
        """
        check_name(request, name)
        body = await _read(request, RepositoryUnloadRequest)
        check_unload(body.parameters or {})
        await models.unload(name)
        return Response()

    return router


def index_of(states: Iterable[ModelState], *, ready: bool) -> list[ModelIndex]:
    """Return the entries of models."""
    return [
        ModelIndex(name=one.name, version=VERSION, state=one.state, reason=one.reason)
        for one in states
        if one.state == "READY" or not ready
    ]


def check_load(parameters: Mapping[str, object]) -> None:
    """Raise InputError if the parameters of a load are not empty."""
    for name in parameters:
        raise InputError(
            f"Expected no parameter of a load, got {name[:100]!r}.",
            "Put the changed bundle in the place of the model's bundle, and load the model without "
            "parameters.",
        )


def check_unload(parameters: Mapping[str, object]) -> None:
    """Raise InputError unless the only parameter of an unload is a false ``unload_dependents``."""
    for name, value in parameters.items():
        if name != _DEPENDENTS or value is not False:
            given = "another value" if name == _DEPENDENTS else repr(name[:100])
            raise InputError(
                f"Expected no parameter of an unload but {_DEPENDENTS}, which is false, got "
                f"{given}.",
                "Unload each model by its name: no model depends on another.",
            )


async def _read(request: Request, model: type[Body]) -> Body:
    """Receive and check a body, which may be empty and of any content type."""
    content = await parse_json(request, await receive(request) or b"{}")
    return checked(content, model, {}, request)


def _problems(statuses: Sequence[int]) -> dict[int | str, dict[str, Any]]:
    described = responses(ProtocolProblem)
    return {status: described[status] for status in statuses}


def _body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a route's description of a body that may be empty."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": False, "content": content}}
