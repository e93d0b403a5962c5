"""From the bytes of a request body to a checked request."""

import codecs
import math
import re
from collections.abc import Collection, Mapping, Sequence
from email.message import Message
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from aftexport.errors import InputError
from aftexport.system.gc import collection_paused
from aftserve.errors import ClientGoneError, DocumentTooLongError, RefusedError
from aftserve.http.content_codings import CODINGS, IDENTITY, coding_of

Model = TypeVar("Model", bound=BaseModel)

_CHARSETS = ("utf-8", "utf8", "us-ascii")
_MAX_TYPE_CHARACTERS = 1024
_REFUSED = re.compile(r"q=0(\.0*)?")
"""Weight of a media type that a client does not accept."""
JSON = "application/json"


class NotJsonError(RefusedError):
    """The endpoint does not take bodies of this type."""

    status = 415


class UnknownEncodingError(NotJsonError):
    """The server does not expand bodies of this content encoding."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers with the encodings that it expands, as RFC 7694 asks."""
        return {"Accept-Encoding": ", ".join(CODINGS)}


async def read_json(
    request: Request,
    model: type[Model],
    *,
    other_types: Sequence[str] = (),
    max_entries: Mapping[str, int],
) -> Model:
    """Receive and check a JSON body.

    Args:
        request: a request whose body has not been received.
        model: model of the body.
        other_types: media types that the endpoint takes beside JSON, for the error message.
        max_entries: maximum length of the lists, by field.

    Raises:
        NotJsonError: if its headers say that it is not JSON, or of an unknown encoding.
        InputError: if it is not JSON, or has a field that the model lacks.
        DocumentTooLongError: if a list has too many entries.
        RequestValidationError: if a field does not fit the model.
        ClientGoneError: if the client left before the end of the body.
    """
    kind = media_type(request)
    if kind != JSON and not kind.endswith("+json"):
        raise NotJsonError(
            f"The body's content type must be {_one_of(JSON, *other_types)}, got "
            f"{kind[:100] or 'none'}.",
            "Send one of these types, and name it in the Content-Type header."
            if other_types
            else "Send JSON, and name it in the Content-Type header.",
        )
    return parse(await receive(request), model, max_entries)


async def receive(request: Request) -> bytes:
    """Receive a body of any type; raise NotJsonError if its encoding is unknown."""
    check_encoding(request)
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientGoneError from None


def check_encoding(request: Request) -> None:
    """Raise NotJsonError if a body has an unknown encoding."""
    coding = coding_of(request.scope["headers"])
    if coding not in (IDENTITY, *CODINGS):
        raise UnknownEncodingError(
            f"The body's content encoding must be {_one_of(*CODINGS)}, got {coding[:100]}.",
            "Compress it by one of these, or send it uncompressed.",
        )


def check_charset(request: Request) -> None:
    """Raise NotJsonError if a body's charset is not UTF-8."""
    content_type = request.headers.get("content-type", "")
    if len(content_type) > _MAX_TYPE_CHARACTERS:  # parsing takes the square of its length
        raise NotJsonError(
            "The body's content type is too long.", "Send it without parameters, in UTF-8."
        )
    header = Message()
    header["Content-Type"] = content_type
    charset = header.get_content_charset("utf-8")
    if charset not in _CHARSETS:
        raise NotJsonError(f"The body's charset must be utf-8, got {charset[:100]}.", "Send UTF-8.")


def media_type(request: Request) -> str:
    """Return the media type of a body, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def accepted_type(request: Request, kinds: Collection[str]) -> str | None:
    """Return the first of some media types in the Accept header of a request; None without one."""
    for entry in request.headers.get("accept", "").lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        if kind in kinds and not any(map(_REFUSED.fullmatch, parameters)):
            return kind
    return None


def _one_of(*kinds: str) -> str:
    *first, last = kinds
    return f"{', '.join(first)} or {last}" if first else last


def parse(body: bytes, model: type[Model], max_entries: Mapping[str, int]) -> Model:
    """Check a body that was received; see ``read_json``.

    The error names only the first fault, because a list of all faults of a hostile body would take
    minutes and gigabytes.
    """
    content = parse_json(body)
    known = ", ".join(model.model_fields)
    if not isinstance(content, dict):
        raise InputError(
            f"The body must be a JSON object, got {kind_of(content)}.",
            f"Send an object with the fields {known}.",
        )
    for name, value in content.items():
        if name not in model.model_fields:
            raise InputError(f"There is no field {name[:100]!r}.", f"Fields are {known}.")
        if isinstance(value, list) and len(value) > max_entries.get(name, math.inf):
            raise DocumentTooLongError(
                f"{name} must have at most {max_entries[name]} entries, got {len(value)}.",
                "Put the ids of each document in their own list, because each entry is a document."
                if isinstance(value[0], int)
                else "Send them in several requests.",
            )
    try:
        return model.model_validate(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise RequestValidationError(found) from None


def kind_of(content: Any) -> str:
    """Return the name of a JSON value's type, with its article."""
    match content:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case dict():
            return "an object"
        case _:
            return "an array"


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON body; raise InputError if it is not JSON."""
    try:
        with collection_paused():
            # The parser of the model would hold a tree of the body beside the objects.
            return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        remedy = "Send JSON in UTF-8."
        if body.startswith(codecs.BOM_UTF8):
            remedy = "Remove the byte order mark at the beginning."
        if "hex escape" in str(error):
            remedy = "Send whole characters: one of \\ud800 to \\udfff is half a surrogate pair."
        raise InputError(f"The body is not JSON: {error}.", remedy) from None
