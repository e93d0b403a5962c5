"""The parts of an adapter: documents, the choice of an output; the adapters that settings name."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, FastAPI, Query, Request, params
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.routing import Match

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError, UsageError
from aftexport.heads import (
    BinaryClassification,
    Head,
    MultiLabelClassification,
    SingleLabelClassification,
)
from aftexport.system.arguments import import_callable
from aftserve.adapter_names import ADAPTERS
from aftserve.api.document_answers import answer_documents, deadline_of
from aftserve.api.error_responses import ErrorBody
from aftserve.api.model_choice import PREFIX, read_and_answer
from aftserve.api.request_body import Describe, Schema, invalid, kind_of
from aftserve.errors import DocumentTooLongError
from aftserve.model.classifier import Classifier
from aftserve.model.documents import DocumentAnswer
from aftserve.model.wanted import AnswerOptions
from aftserve.schemas import TokenIds
from aftserve.serving.repository import ModelRepository
from aftserve.serving.service import Service
from aftserve.types import Document


@dataclass(frozen=True)
class Adapter:
    """Endpoints in the format of another server."""

    router: APIRouter
    """The endpoints, at complete paths."""
    error_body: ErrorBody | None = None
    """Makes the JSON of an error; None for that of ``/infer``."""
    describe: Describe | None = None
    """Puts the limits of a model into the OpenAPI document."""
    probes: Sequence[str] = ()
    """The paths that a platform asks every few seconds; they are logged at the level of debug."""

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


T = TypeVar("T")
_IDS: TypeAdapter[list[int]] = TypeAdapter(TokenIds)


def documents_of(given: Any, field: str, max_documents: int) -> list[Document]:
    """Return the documents of a field: a text, token ids, or a list of either."""
    if is_document(given):
        return [document_of(given, (field,))]
    if not isinstance(given, list | np.ndarray) or not len(given):
        raise InputError(
            f"{field} must be a text, token ids, or a list of them, got "
            f"{'an empty array' if isinstance(given, list) else kind_of(given)}.",
            "Send at least one document.",
        )
    check_count(len(given), field, max_documents)
    return [document_of(one, (field, index)) for index, one in enumerate(given)]


def is_document(given: Any) -> bool:
    """Return whether a JSON value is one document: a text, or a list of numbers."""
    if isinstance(given, np.ndarray):
        return given.ndim == 1
    if isinstance(given, list):
        return bool(given) and isinstance(given[0], int | float)
    return isinstance(given, str)


def check_count(count: int, field: str, max_documents: int) -> None:
    """Raise DocumentTooLongError if a list has too many documents."""
    if count > max_documents:
        raise DocumentTooLongError(
            f"{field} must have at most {max_documents} documents, got {count}.",
            "Send them in several requests.",
        )


def document_of(given: Any, place: Sequence[str | int]) -> Document:
    """Return one document, a text or token ids; errors name its place in the body."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list | np.ndarray):
        raise InputError(
            f"{'.'.join(map(str, place))} must be a text or token ids, got {kind_of(given)}.",
            "Send documents of these two forms only.",
        )
    return validated(_IDS, given, place)


def validated(kind: TypeAdapter[T], given: Any, place: Sequence[str | int]) -> T:
    """Return a value of a body; RequestValidationError names its place if it does not fit."""
    try:
        return kind.validate_python(given)
    except ValidationError as error:
        raise invalid(error, place) from None


Output = Annotated[
    str | None,
    Query(
        description="Output that answers, of `heads` in GET /info; only needed if several outputs "
        "fit the format.",
    ),
]


WITH_LABELS: tuple[type[Head], ...] = (
    SingleLabelClassification,
    BinaryClassification,
    MultiLabelClassification,
)
"""The heads whose answers have a probability of every label."""


def heads_for_documents(manifest: Manifest, *kinds: type[Head]) -> list[str]:
    """Return the names of a model's heads of some kinds that answer for documents."""
    return [
        name
        for name, head in manifest.heads.items()
        if isinstance(head, kinds) and not head.is_per_token
    ]


def choose_head(names: list[str], wanted: str | None) -> str:
    """Return the wanted head, or the only one that fits; InputError if the client must choose."""
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted not in names:
        given = "none" if wanted is None else repr(wanted[:100])
        raise InputError(
            f"Expected an output of {', '.join(names)}, got {given}.",
            "Name one in the query as output=NAME.",
        )
    return wanted


async def answer_by_output(
    request: Request,
    service: Service,
    documents: Sequence[Document],
    names: Callable[[Manifest], list[str]],
    output: str | None,
    deadline_seconds: float | None,
) -> tuple[str, Sequence[DocumentAnswer]]:
    """Classify documents by the chosen one of the outputs ``names``; return its name too."""
    deadline = deadline_of(request, deadline_seconds, service.settings.deadline_seconds)

    def read(manifest: Manifest) -> str:
        return choose_head(names(manifest), output)

    async def answer(name: str) -> list[DocumentAnswer]:
        options = AnswerOptions(outputs=[name])
        return await answer_documents(request, service, documents, deadline, options=options)

    return await read_and_answer(service, read, answer)


def put_outputs(
    document: Schema, path: str, classifier: Classifier | None, *kinds: type[Head]
) -> None:
    """Put the heads that fit a path into an OpenAPI document; none without a classifier."""
    names = heads_for_documents(classifier.manifest, *kinds) if classifier is not None else []
    put_names(document, path, names)


def put_names(document: Schema, path: str, names: Sequence[str]) -> None:
    """Put the names of outputs among which a request to a path chooses into a document."""
    for parameter in document["paths"][path]["post"]["parameters"]:
        if parameter["name"] == "output" and names:
            parameter["schema"] = {"type": "string", "enum": [*names]}
            parameter["required"] = len(names) > 1
