"""The parts of an adapter, and the adapters that the settings name."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, params
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import Match

from aftexport.errors import UsageError
from aftexport.system.callables import import_callable
from aftserve.adapter_names import ADAPTERS
from aftserve.api.document_schemas import Describe
from aftserve.api.error_responses import ErrorBody
from aftserve.api.model_choice import PREFIX
from aftserve.serving.repository import ModelRepository


@dataclass(frozen=True)
class Adapter:
    """Endpoints in the format of another server."""

    router: APIRouter
    """The endpoints, at complete paths."""
    error_body: ErrorBody | None = None
    """Makes the JSON of an error; None for that of ``/infer``."""
    describe: Describe | None = None
    """Puts the limits of a model into the OpenAPI document."""

    @property
    def routes(self) -> list[APIRoute]:
        """The endpoints."""
        return [route for route in self.router.routes if isinstance(route, APIRoute)]

    @property
    def error_bodies(self) -> dict[str, ErrorBody]:
        """The JSON of errors, by the path of each endpoint."""
        return {} if self.error_body is None else {r.path: self.error_body for r in self.routes}


CreateAdapter = Callable[[ModelRepository, Sequence[params.Depends]], Adapter]
"""A function that makes an adapter of the models, from the checks of a request."""


def import_adapters(names: Iterable[str]) -> dict[str, CreateAdapter]:
    """Import the functions that make adapters, by their names; UsageError if one is unusable."""
    return {name: _import_adapter(name) for name in names}


def create_adapters(
    models: ModelRepository, guards: Sequence[params.Depends]
) -> dict[str, Adapter]:
    """Make the adapters of the settings, whose ``guards`` run before a body is read."""
    functions = import_adapters(models.settings.api)
    return {
        name: create(models, guards) if name in ADAPTERS else _call(name, create, models, guards)
        for name, create in functions.items()
    }


def include_adapters(app: FastAPI, adapters: Mapping[str, Adapter]) -> None:
    """Add the endpoints of adapters; UsageError if a path is taken or below ``/models/``."""
    for name, adapter in adapters.items():
        for route in adapter.routes:
            if route.path.startswith(PREFIX):
                raise UsageError(
                    f"--api {name}: expected a path that does not begin with {PREFIX}, got "
                    f"{route.path}; the addresses of the models begin so.",
                    "Choose another path.",
                )
            for method in sorted(route.methods or ()):
                if _has_endpoint(app, route.path, method):
                    raise UsageError(
                        f"--api {name}: expected a free path, got {method} {route.path}, which "
                        "another endpoint has.",
                        "Choose another path, or name only one of two adapters by --api.",
                    )
        app.include_router(adapter.router)


class OpenAIErrorInfo(BaseModel):
    """An error."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: None = None
    code: None = None


class OpenAIError(BaseModel):
    """The problem of a request, and its remedy."""

    error: OpenAIErrorInfo


def error_body(error: Exception, status: int, message: str) -> dict[str, Any]:
    """Return an error in the format of OpenAI."""
    kind: Any = "server_error" if status >= 500 else "invalid_request_error"
    info = OpenAIErrorInfo(message=message, type="rate_limit_error" if status == 429 else kind)
    return OpenAIError(error=info).model_dump()


def _import_adapter(name: str) -> CreateAdapter:
    create: CreateAdapter
    if name in ADAPTERS:
        # Not by import_callable, whose working folder could shadow modules of the server.
        module, _, attribute = ADAPTERS[name].partition(":")
        create = getattr(importlib.import_module(module), attribute)
    else:
        create = import_callable(name, "--api")
    return create


def _call(
    name: str, create: CreateAdapter, models: ModelRepository, guards: Sequence[params.Depends]
) -> Adapter:
    """Return the adapter that a user's function makes."""
    try:
        adapter = create(models, guards)
    except (Exception, SystemExit) as error:  # the user's code
        raise UsageError(
            f"--api {name}: the call raised {type(error).__name__}: {error}.",
            "Give a callable that takes the models and the checks of a request.",
        ) from error
    if not isinstance(adapter, Adapter):
        raise UsageError(
            f"--api {name} must return an Adapter, got a {type(adapter).__name__}.",
            "Return aftserve.api.adapters.adapter.Adapter(router).",
        )
    return adapter


def _has_endpoint(app: FastAPI, path: str, method: str) -> bool:
    scope = {"type": "http", "path": path, "root_path": "", "method": method, "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
