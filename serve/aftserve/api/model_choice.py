"""The model that a request asks for: in its path, in its body, or neither."""

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftserve.errors import NotFoundError, UnavailableError
from aftserve.model.documents import DocumentAnswer
from aftserve.serving.repository import ModelRepository, ModelState, named_in
from aftserve.serving.service import Service

PREFIX = "/models/"
"""Start of the paths below which the server is that of one model."""
_MODEL_PATH = re.compile(rf"({PREFIX}([^/]+))/")
_PATH_NAME = "path_model"
T = TypeVar("T")
_MAX_READINGS = 4
"""Readings of a request before it is refused; a reload takes longer than most requests."""


class ModelPathMiddleware:
    """ASGI middleware that takes ``/models/NAME`` from the start of a path."""

    # The name goes into the state of the request, and ``/models/NAME`` to the end of ``root_path``,
    # which routers leave out. The rest of the path is that of a server with one model.

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] == "http":
            root_path = scope.get("root_path", "")
            found = _MODEL_PATH.match(scope["path"].removeprefix(root_path))
            if found is not None:
                start, name = found.groups()
                # In place: other middleware reads the route from this scope.
                scope["root_path"] = root_path + start
                scope.setdefault("state", {})[_PATH_NAME] = name
        await self._app(scope, receive, send)


def models_of(request: Request) -> ModelRepository:
    """Return the models of the server that received a request."""
    models: ModelRepository = request.app.state.models
    return models


def path_name(request: Request) -> str | None:
    """Return the name in the path of a request: NAME of ``/models/NAME``; None without one."""
    name: str | None = getattr(request.state, _PATH_NAME, None)
    return name


def visible(request: Request) -> Sequence[Service]:
    """Return the models that a request may name: below ``/models/NAME`` only that one."""
    models, name = models_of(request), path_name(request)
    return models.loaded() if name is None else [models.named(name)]


def shows_names(request: Request) -> bool:
    """Return whether requests without an API key may see the names of all models."""
    return models_of(request).settings.api_keys is None


async def _check_path(request: Request) -> None:
    """Check that the model in the path is loaded; it needs no API key."""
    name = path_name(request)
    if name is None:
        return
    if shows_names(request):
        models_of(request).named(name)
    elif all(service.name != name for service in models_of(request).loaded()):
        raise NotFoundError(
            f"Expected the name of a loaded model, got {name[:100]!r}.",
            "POST /v2/repository/index with an API key lists the names.",
        )


OPEN = (Depends(_check_path),)
"""The checks of a router that needs no API key."""


def chosen_or_none(request: Request) -> Service | None:
    """Return the model that the path names, else the default, which may be None."""
    models, name = models_of(request), path_name(request)
    return models.default if name is None else models.named(name)


async def chosen(request: Request) -> Service:
    """Return the model that the path names, else the default; NotFoundError if it is absent."""
    service = chosen_or_none(request)
    if service is None:
        names = [service.name for service in models_of(request).loaded()]
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        raise NotFoundError(
            f"Expected a path with the name of a model, got {path}; the server has "
            f"{', '.join(names) or 'no model'}.",
            f"Send the request to {PREFIX}{quote(names[0]) if names else 'NAME'}{path}.",
        )
    return _noted(request, service)


ChosenModel = Annotated[Service, Depends(chosen)]
"""The model of a request's path. The checks of the router come before it."""


async def requested(request: Request, name: str | None) -> Service:
    """Return the model that a body or the rest of a path names; None means the path's."""
    if name is None:
        return await chosen(request)
    return _noted(request, named_in(visible(request), name))


async def _named(request: Request, name: str) -> Service:
    return await requested(request, name)


NamedModel = Annotated[Service, Depends(_named)]
"""The model that the rest of a path names. The checks of the router come before it."""


def _noted(request: Request, service: Service) -> Service:
    """Return a model that the request holds, and whose name counts the response."""
    request.state.model = service.name
    request.state.releases.append(service.holders.add())
    return service


def check_name(request: Request, name: str) -> None:
    """Check that the path of a request allows the name of a model, loaded or not."""
    expected = path_name(request)
    if expected not in (None, name):
        raise NotFoundError(
            f"Expected the model {expected!r}, got {name[:100]!r}.", "Name the expected model."
        )


async def visible_states(request: Request) -> Sequence[ModelState]:
    """Return the states of the models; below ``/models/NAME`` only of that one."""
    states, name = await models_of(request).index(), path_name(request)
    if name is None:
        return states
    found = [one for one in states if one.name == name]
    if not found:
        names = ", ".join(repr(one.name) for one in states) or "none"
        raise NotFoundError(
            f"Expected one of the models {names}, got {name[:100]!r}.", "Name an expected model."
        )
    return found


def readiness(request: Request) -> tuple[bool, str]:
    """Return whether the server, or the model of the path, takes requests, and its status."""
    models, name = models_of(request), path_name(request)
    if name is None:
        return models.ready, models.status
    health = models.named(name).health
    return health.ready, health.status


async def read_and_answer(
    service: Service,
    read: Callable[[Manifest], T],
    answer: Callable[[T], Coroutine[Any, Any, Sequence[DocumentAnswer]]],
) -> tuple[T, Sequence[DocumentAnswer]]:
    """Read a request by a manifest, and answer it by the bundle of the same manifest."""
    # A reload may come between the two. The request is then read and answered again, because names
    # that were found in one bundle may be absent from the other.
    for _ in range(_MAX_READINGS):
        bundle = service.active.bundle
        reading = read(bundle.manifest)
        try:
            answers = await answer(reading)
        except InputError:
            if service.active.bundle is bundle:
                raise
            continue  # the new bundle refused names of the one before
        used = answers[0].result.bundle if answers else service.active.bundle.digest
        if used == bundle.digest:
            return reading, answers
    raise UnavailableError(
        f"The bundle was replaced during each of {_MAX_READINGS} readings of the request.",
        "Send it again.",
        1,
    )
