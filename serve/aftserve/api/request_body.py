"""From the bytes of a body to a checked request, whatever they are."""

import codecs
import math
from email.message import Message
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from aftexport.errors import InputError
from aftexport.garbage_collection import collection_paused
from aftserve.errors import ClientGoneError, DocumentTooLongError, RefusedError

Model = TypeVar("Model", bound=BaseModel)

_CHARSETS = ("utf-8", "utf8", "us-ascii")
_MOST_CHARACTERS = 1024
JSON = "application/json"


class NotJsonError(RefusedError):
    """A body says that it is something else than an address takes."""

    status = 415


async def read(request: Request, model: type[Model], *others: str, **most: int) -> Model:
    """Receives and checks a body.

    Args:
        request: whose body was not received yet.
        model: of the body.
        others: media types that the address takes beside JSON, for the message.
        most: entries of its lists, by field.

    Raises:
        NotJsonError: by its headers it is no JSON, or it is compressed.
        InputError: it is no JSON, or has a field that the model lacks.
        DocumentTooLongError: a list has more entries than it may.
        RequestValidationError: a field is not as the model has it.
        ClientGoneError: it did not arrive.
    """
    kind = media_type(request)
    if kind != JSON and not kind.endswith("+json"):
        raise NotJsonError(
            f"The body's content type must be {_one_of(JSON, *others)}, got "
            f"{kind[:100] or 'none'}.",
            "Send one of these, and say so." if others else "Send JSON, and say so.",
        )
    return parse(await receive(request), model, **most)


async def receive(request: Request) -> bytes:
    """Receives a body of any type; raises NotJsonError where it is compressed."""
    check_encoding(request)
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientGoneError from None


def check_encoding(request: Request) -> None:
    """Raises NotJsonError where a body is compressed."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise NotJsonError(
            f"The body's content encoding must be identity, got {encoding[:100]}.",
            "Send it uncompressed.",
        )


def check_charset(request: Request) -> None:
    """Raises NotJsonError where a body says that it is text in another encoding than UTF-8."""
    content_type = request.headers.get("content-type", "")
    if len(content_type) > _MOST_CHARACTERS:  # reading its parameters takes the square of that
        raise NotJsonError(
            "The body's content type is too long.", "Send it without parameters, in UTF-8."
        )
    header = Message()
    header["Content-Type"] = content_type
    charset = header.get_content_charset("utf-8")
    if charset not in _CHARSETS:
        raise NotJsonError(
            f"The body's charset must be utf-8, got {charset[:100]}.", "Send UTF-8, and say so."
        )


def media_type(request: Request) -> str:
    """What a body says that it is, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _one_of(*kinds: str) -> str:
    *first, last = kinds
    return f"{', '.join(first)} or {last}" if first else last


def parse(body: bytes, model: type[Model], **most: int) -> Model:
    """Like ``read``, of a body that was received.

    What is wrong is said of the first thing that is: a list of all faults of a hostile body
    takes minutes, and gigabytes.
    """
    content = objects(body)
    known = ", ".join(model.model_fields)
    if not isinstance(content, dict):
        raise InputError("The JSON is no object.", f"Send one, whose fields are {known}.")
    for name, value in content.items():
        if name not in model.model_fields:
            raise InputError(f"There is no field {name[:100]!r}.", f"Fields are {known}.")
        if isinstance(value, list) and len(value) > most.get(name, math.inf):
            raise DocumentTooLongError(
                f"{name} has {len(value)} entries, this server takes {most[name]}.",
                "Each entry is one document: put a document's ids in a list of their own."
                if isinstance(value[0], int)
                else "Send them in several requests.",
            )
    try:
        return model.model_validate(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise RequestValidationError(found) from None


def objects(body: bytes) -> Any:
    """What the JSON of a body holds; raises InputError where it is none."""
    try:
        with collection_paused():
            # Not by way of the model: that would hold a tree of the body beside the objects.
            return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        remedy = "Send JSON in UTF-8."
        if body.startswith(codecs.BOM_UTF8):
            remedy = "Send it without the byte order mark at its beginning."
        if "hex escape" in str(error):
            remedy = (
                "Send whole characters: one of \\ud800 to \\udfff alone is half a surrogate pair."
            )
        raise InputError(f"The body is not JSON: {error}.", remedy) from None
