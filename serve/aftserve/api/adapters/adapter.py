"""The parts of an adapter, and the adapters that the settings name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI, params
from fastapi.routing import APIRoute
from starlette.routing import Match

from aftexport.errors import UsageError
from aftexport.system.callables import import_callable
from aftserve.adapter_names import ADAPTERS
from aftserve.api.error_responses import ErrorBody
from aftserve.api.openapi_body import Schema
from aftserve.service import Service


@dataclass(frozen=True)
class Adapter:
    """Endpoints in the format of another server.

    Attributes:
        router: the endpoints, at complete paths.
        error_body: makes the JSON of an error; None for that of ``/infer``.
        describe: puts the limits of the active bundle into the OpenAPI document.
    """

    router: APIRouter
    error_body: ErrorBody | None = None
    describe: Callable[[Schema], None] | None = None

    @property
    def routes(self) -> list[APIRoute]:
        """The endpoints."""
        return [route for route in self.router.routes if isinstance(route, APIRoute)]

    @property
    def error_bodies(self) -> dict[str, ErrorBody]:
        """The JSON of errors, by the path of each endpoint."""
        return {} if self.error_body is None else {r.path: self.error_body for r in self.routes}


CreateAdapter = Callable[[Service, Sequence[params.Depends]], Adapter]
"""A function that makes an adapter of a service, from the checks of a request."""


def create_adapters(service: Service, guards: Sequence[params.Depends]) -> dict[str, Adapter]:
    """Make the adapters of the settings, by their names.

    Args:
        service: the service that classifies.
        guards: checks of a request before its body is read.

    Raises:
        UsageError: if an adapter of a user cannot be imported.
    """
    adapters = {}
    for name in service.settings.api:
        create: CreateAdapter = import_callable(ADAPTERS.get(name, name), "--api")
        adapter = create(service, guards)
        if not isinstance(adapter, Adapter):
            raise UsageError(
                f"--api {name} must return an Adapter, got a {type(adapter).__name__}.",
                "Return aftserve.api.adapters.adapter.Adapter(router).",
            )
        adapters[name] = adapter
    return adapters


def include_adapters(app: FastAPI, adapters: Mapping[str, Adapter]) -> None:
    """Add the endpoints of adapters to an application.

    Raises:
        UsageError: if the application has an endpoint of the same path and method.
    """
    for name, adapter in adapters.items():
        for route in adapter.routes:
            for method in sorted(route.methods or ()):
                if _has_endpoint(app, route.path, method):
                    raise UsageError(
                        f"--api {name}: expected a free path, got {method} {route.path}, which "
                        "another endpoint has.",
                        "Choose another path, or name only one of two adapters by --api.",
                    )
        app.include_router(adapter.router)


def _has_endpoint(app: FastAPI, path: str, method: str) -> bool:
    scope = {"type": "http", "path": path, "root_path": "", "method": method, "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
