"""From the bytes of a request body to a checked request, and the schemas of bodies for OpenAPI."""

import codecs
import math
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from email.message import Message
from typing import Any, TypeVar

import anyio.to_thread
import numpy as np
from fastapi.exceptions import RequestValidationError
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from aftexport.errors import InputError
from aftexport.system.process import collection_paused
from aftserve.api.json_steps import parse_in_steps, text_bytes, too_many_entries
from aftserve.api.model_choice import models_of
from aftserve.api.request_checks import place_of_option
from aftserve.errors import ClientGoneError, RefusedError, utf8_remedy
from aftserve.http.body_limits import CODINGS, IDENTITY, BodyTooLargeError, coding_of
from aftserve.model.classifier import PIECE_CHARACTERS, Classifier
from aftserve.model.feature_tokens import FeatureSpace, FeatureTokens, FeatureWriter
from aftserve.model.npy_file import SAVE, NpyHeader, check_header, is_npy, parse_header
from aftserve.types import Tokens

Model = TypeVar("Model", bound=BaseModel)
_CHARSETS = ("utf-8", "utf8", "us-ascii")
_MAX_TYPE_CHARACTERS = 1024
_REFUSED = re.compile(r"q=0(\.0*)?")
"""Weight of a media type that a client does not accept."""
_STEP_BYTES = 1 << 13
"""Maximum bytes of JSON that are parsed at once."""
_MAX_FAULTS = 1000
"""Maximum faults of a body that are listed, which takes a millisecond."""
_LARGE_BYTES = 1 << 20
"""Larger bodies are parsed one after the other, because lists that grow take memory."""
JSON = "application/json"
TEXT = "text/plain"
BYTES = "application/octet-stream"
NPY = "application/x-npy"
_BLOCK_BYTES = 1 << 20
"""Bytes of the values that are converted at a time."""


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
    """Receive and check a JSON body, whose lists have at most ``max_entries`` by field."""
    kind = media_type(request)
    if kind != JSON and not kind.endswith("+json"):
        raise NotJsonError(
            f"The body's content type must be {_one_of(JSON, *other_types)}, got "
            f"{kind[:100] or 'none'}.",
            "Send one of these types, named in the Content-Type header: with curl, --json or -H."
            if other_types
            else "Send JSON, named in the Content-Type header: with curl, --json.",
        )
    content = await parse_json(request, await receive(request), max_entries)
    return checked(content, model, max_entries, request)


async def read_text(request: Request, classifier: Classifier) -> str:
    """Receive one document, and stop as soon as it has too many tokens."""
    # Each piece that arrives is tokenized to count its tokens. The complete document is tokenized
    # later, as a whole. A byte order mark at its beginning is removed.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    parts, piece, characters, tokens = list[str](), "", 0, 0
    check_charset(request)
    classifier.check_text("")
    async for content in body_parts(request):
        part = _decoded(decoder, content)
        parts.append(part)
        piece += part
        characters += len(part)
        classifier.check_characters(characters, more=True)
        if len(piece) >= PIECE_CHARACTERS:
            tokens = await anyio.to_thread.run_sync(classifier.count, piece, tokens)
            piece = ""
    parts.append(_decoded(decoder, b"", final=True))
    text = "".join(parts)
    request.state.body.hold_values(text_bytes(text))
    return text


async def read_bytes(request: Request, classifier: Classifier) -> Tokens:
    """Receive one document of raw bytes as token ids, and stop as soon as it has too many."""
    document = bytearray()
    async for content in body_parts(request):
        document += content
        classifier.check_length(len(document), more=True)
    request.state.body.hold_values(8 * len(document))
    return np.frombuffer(document, np.uint8).astype(np.int64)


async def read_npy(
    request: Request, classifier: Classifier, space: FeatureSpace, max_bytes: int
) -> NDArray[np.int64] | FeatureTokens:
    """Receive one document, and refuse it by its header before its values arrive."""
    check_encoding(request)
    if classifier.needs_words:
        raise NotJsonError(f"This model needs the words of a text, got {NPY}.", "Send text/plain.")
    if classifier.manifest.features is not None:
        # The values go to a file as they arrive, so they do not count as held.
        request.state.body.allow(max_bytes)
    parts = body_parts(request)
    header, rest = await _header(parts)
    check_header(header, classifier)
    _check_size(request, header, max_bytes)
    classifier.check_count(header.shape[0])
    if classifier.manifest.features is None:
        request.state.body.hold_values(8 * header.shape[0])
        blocks = [block async for block in _values(parts, rest, header)]
        return np.concatenate(blocks, dtype=np.int64)
    writer = FeatureWriter(classifier.manifest.features, header.shape[0], space)
    async for block in _values(parts, rest, header):
        writer.add(block)
    return writer.finish()


async def receive(request: Request) -> bytes:
    """Receive a body of any type; raise NotJsonError if its encoding is unknown."""
    check_encoding(request)
    try:
        # Request.body() would keep the bytes beside the values until the answer.
        return b"".join([part async for part in request.stream()])
    except ClientDisconnect:
        raise ClientGoneError from None


async def body_parts(request: Request) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive; ClientGoneError if the client leaves."""
    check_encoding(request)
    try:
        async for content in request.stream():
            yield content
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


async def parse_json(
    request: Request, body: bytes, max_entries: Mapping[str, int] | None = None
) -> Any:
    """Return the value of a JSON body, in which lists of numbers may be arrays."""
    turns, hold = models_of(request).shared.turns, request.state.body.hold_values
    try:
        if len(body) <= _STEP_BYTES:
            await turns.take()
            with collection_paused():
                # The parser of the model would hold a tree of the body beside the objects.
                return from_json(body, allow_inf_nan=False)
        async with turns.large if len(body) > _LARGE_BYTES else nullcontext():
            return await turns.run(parse_in_steps(body, hold, max_entries or {}))
    except ValueError as error:
        remedy = "Send JSON in UTF-8."
        if body.startswith(codecs.BOM_UTF8):
            remedy = "Remove the byte order mark at the beginning."
        if "hex escape" in str(error):
            remedy = "Send whole characters: one of \\ud800 to \\udfff is half a surrogate pair."
        raise InputError(f"The body is not JSON: {error}.", remedy) from None


def checked(
    content: Any, model: type[Model], max_entries: Mapping[str, int], request: Request
) -> Model:
    """Check the value of a body; see ``read_json``."""
    # The error names only the first fault, because a list of all faults of a hostile body would
    # take minutes and gigabytes.
    known = ", ".join(model.model_fields)
    if not isinstance(content, dict):
        raise InputError(
            f"The body must be a JSON object, got {kind_of(content)}.",
            f"Send an object with the fields {known}.",
        )
    entries = dict[str, Any]()
    for name, value in content.items():
        if name not in model.model_fields:
            remedy = place_of_option(request, name, value) or f"Fields are {known}."
            raise InputError(f"Expected a known field, got {name[:100]!r}.", remedy)
        is_list = isinstance(value, list | np.ndarray)
        if is_list and len(value) > max_entries.get(name, math.inf):
            is_flat = isinstance(value[0], int | np.number)
            raise too_many_entries(name, max_entries[name], str(len(value)), is_flat=is_flat)
        # Equal rows are one array, whose rows are entries here.
        is_rows = name in max_entries and isinstance(value, np.ndarray) and value.ndim > 1
        entries[name] = list(value) if is_rows else value
    try:
        return model.model_validate(entries)
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError, place: Sequence[str | int] = ()) -> RequestValidationError:
    """Return the error of a value at a place of a body, without long texts from the body."""
    if (count := error.error_count()) > _MAX_FAULTS:
        fault = {
            "loc": tuple(place),
            "msg": f"Got {count} invalid values",
            "type": "invalid_values",
        }
        return RequestValidationError([fault])
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return RequestValidationError(
        [one | {"loc": _short_place(place, one["loc"]), "msg": one["msg"][:500]} for one in found]
    )


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


def _decoded(decoder: codecs.IncrementalDecoder, content: bytes, *, final: bool = False) -> str:
    try:
        return decoder.decode(content, final)
    except UnicodeDecodeError as error:
        problem = f"The text is not UTF-8: {error.reason}."
        raise InputError(problem, utf8_remedy(error.object)) from None


def _one_of(*kinds: str) -> str:
    *first, last = kinds
    return f"{', '.join(first)} or {last}" if first else last


def _short_place(place: Sequence[str | int], within: Sequence[str | int]) -> tuple[str | int, ...]:
    # Keys of objects come from the body.
    return tuple(part[:100] if isinstance(part, str) else part for part in (*place, *within))


async def _header(parts: AsyncIterator[bytes]) -> tuple[NpyHeader, bytes]:
    """Return the header, and the values that arrived with it."""
    start = b""
    async for part in parts:
        start += part
        if not is_npy(start):
            raise NotJsonError(
                "The body must be a .npy file, got other bytes.",
                "Write it by numpy.save. Raw bytes need a model with the tokenizer bytes.",
            )
        if (header := parse_header(start)) is not None:
            return header, start[header.bytes :]
    raise InputError("The body must be a .npy file, got an incomplete header.", SAVE)


def _check_size(request: Request, header: NpyHeader, max_bytes: int) -> None:
    expected = header.bytes + header.array_bytes
    if expected > max_bytes:
        raise BodyTooLargeError(
            f"The body must have at most {max_bytes} bytes, got an array of {header.array_bytes}.",
            "Send a shorter document.",
        )
    announced = request.headers.get("content-length", "")
    is_compressed = coding_of(request.scope["headers"]) in CODINGS
    if not is_compressed and announced.isdigit() and int(announced) != expected:
        raise InputError(
            f"The body must have {expected} bytes by the header of the .npy file, got {announced}.",
            SAVE,
        )


async def _values(
    parts: AsyncIterator[bytes], rest: bytes, header: NpyHeader
) -> AsyncIterator[NDArray[Any]]:
    """Yield the values in blocks of whole rows."""
    row_bytes = header.dtype.itemsize * math.prod(header.shape[1:])
    pending, received = bytearray(rest), len(rest)

    def block() -> NDArray[Any]:
        whole = len(pending) // row_bytes * row_bytes
        values = np.frombuffer(pending[:whole], header.dtype)
        del pending[:whole]
        return values.reshape(-1, *header.shape[1:])

    _check_received(received, header.array_bytes)
    async for part in parts:
        pending += part
        received += len(part)
        _check_received(received, header.array_bytes)
        if len(pending) >= max(_BLOCK_BYTES, row_bytes):
            yield block()
    if received != header.array_bytes:
        raise InputError(
            f"The array must have {header.array_bytes} bytes by its header, got {received}.", SAVE
        )
    if pending:
        yield block()


def _check_received(received: int, expected: int) -> None:
    if received > expected:
        raise InputError(f"The array must have {expected} bytes by its header, got more.", SAVE)


COMPONENTS = "#/components/schemas/"
Schema = dict[str, Any]
Describe = Callable[[Schema, Classifier | None, Sequence[str]], None]
"""A function that puts the limits of a model into an OpenAPI document.

It gets the document, the classifier of the model, and the names of the models that a request may
name. Without a model, which is None, the document has no limits. The names are empty if the
document leaves them out.
"""
# Name no maximum length: a document that is too long gets 413, and GET /info has the limits.
TEXT_SCHEMA: Schema = {"type": "string", "minLength": 1}
"""The schema of a text."""


def body_schema(model: type[BaseModel], **others: Schema) -> dict[str, Any]:
    """Return a route's description of a body that the endpoint reads itself."""
    json = {"schema": {"$ref": COMPONENTS + model.__name__}}
    content = {"application/json": json} | {kind: {"schema": s} for kind, s in others.items()}
    return {"requestBody": {"required": True, "content": content}}


def ids_schema(vocab_size: int | None, min_tokens: int) -> Schema:
    """Return the schema of the token ids of one document."""
    return {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": (vocab_size or 1) - 1},
        "minItems": min_tokens,
        "description": "Token ids of one document.",
    }


def document_schemas(classifier: Classifier | None) -> list[Schema]:
    """Return the schemas of a document without extra inputs; none for features."""
    if classifier is None:
        return [
            TEXT_SCHEMA,
            {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        ]
    manifest = classifier.manifest
    if manifest.features is not None or manifest.extra_inputs:
        return []
    ids = ids_schema(manifest.vocab_size, classifier.min_tokens)
    takes_text = classifier.has_tokenizer and not manifest.text_pairs
    return [*([TEXT_SCHEMA] if takes_text else []), ids]


def any_of(schemas: list[Schema]) -> Schema:
    """Return the schema of a value that has one of the schemas, which may be none."""
    return {"anyOf": schemas} if schemas else {"not": {}}


def several(schema: Schema) -> Schema:
    """Return the schema of a list of at least one value."""
    return {"type": "array", "items": schema, "minItems": 1}


def name_schema(names: Sequence[str], *others: None) -> Schema:
    """Return the schema of the name of a model."""
    return {"enum": [*names, *others]} if names else {"type": ["string", *["null" for _ in others]]}


def put_body(document: Schema, model: type[BaseModel], properties: Mapping[str, Schema]) -> None:
    """Put the schema of a body into an OpenAPI document."""
    # The models in it get names of their own, because other bodies may have models of equal names.
    start = f"{model.__name__}."
    schema = model.model_json_schema(ref_template=f"{COMPONENTS}{start}{{model}}")
    schema["properties"] |= properties
    parts = {f"{start}{name}": part for name, part in schema.pop("$defs", {}).items()}
    document["components"]["schemas"] |= parts | {model.__name__: schema}
