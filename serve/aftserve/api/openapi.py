"""The OpenAPI document, with the limits of a model."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from urllib.parse import quote
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from aftexport.extra_inputs import TOKEN_TYPES, ExtraInput
from aftserve.api.model_choice import OPEN, chosen_or_none, path_name, shows_names, visible
from aftserve.api.open_inference.schemas import InferenceRequest
from aftserve.api.request_body import (
    BYTES,
    TEXT_SCHEMA,
    Describe,
    Schema,
    ids_schema,
    put_body,
    several,
)
from aftserve.api.request_checks import check_query
from aftserve.model.classifier import Classifier
from aftserve.model.wanted import MAX_NAMES, choices
from aftserve.schemas import DocumentRequest, InferRequest

PATH = "/openapi.json"


def create_router(app: FastAPI, describers: Sequence[Describe]) -> APIRouter:
    """Build the endpoint of the OpenAPI document, which needs no API key."""
    # The document has the limits of the model of the request's path, also after a reload, and none
    # without such a model. ``describers`` put them into the parts of the adapters.
    router = APIRouter(include_in_schema=False, dependencies=[*OPEN, Depends(check_query)])
    # No key is needed, so repeated requests must stay cheap. By the name in the path, a classifier
    # has at most two documents: below its name, and that without a name.
    documents: WeakKeyDictionary[object, dict[str | None, tuple[Sequence[str], Schema]]]
    documents = WeakKeyDictionary()

    @router.get(PATH)
    async def openapi(request: Request) -> JSONResponse:
        """The OpenAPI document."""
        service = chosen_or_none(request)
        classifier = None if service is None else service.model.classifier
        start = path_name(request)
        is_named = start is not None or shows_names(request)
        names = [service.name for service in visible(request)] if is_named else []
        of_model = documents.setdefault(classifier or app, {})
        known, document = of_model.get(start, (None, {}))
        if known != names:
            document = _described(app, classifier, names, describers)
            of_model[start] = (names, document)
        return JSONResponse(document | _servers(request))

    return router


def _servers(request: Request) -> Schema:
    """Return the part of the document that tells the start of the paths."""
    if (name := path_name(request)) is not None:
        # Relative to the document, because a proxy may strip a prefix. "." would end in a slash.
        return {"servers": [{"url": f"../{quote(name, safe='')}"}]}
    root_path = request.scope.get("root_path", "")
    return {"servers": [{"url": quote(root_path)}]} if root_path else {}


def _described(
    app: FastAPI,
    classifier: Classifier | None,
    names: Sequence[str],
    describers: Sequence[Describe],
) -> Schema:
    """Return the document of the application with the limits of a model, if there is one."""
    described = deepcopy(app.openapi())
    put_body(described, InferenceRequest, {})
    if classifier is not None:
        _put_limits(described, classifier)
    else:
        put_body(described, DocumentRequest, {})
        put_body(described, InferRequest, {})
    for describe in describers:
        describe(described, classifier, names)
    return described


def _put_limits(described: Schema, classifier: Classifier) -> None:
    """Put the limits of a model into the description of documents."""
    manifest = classifier.manifest
    bodies = _bodies(
        manifest.vocab_size,
        manifest.features.count if manifest.features else 0,
        classifier.min_tokens,
        classifier.has_tokenizer,
        manifest.extra_inputs,
    )
    if manifest.text_pairs and classifier.has_tokenizer:
        _put_pairs(bodies, manifest.extra_inputs)
    described["components"]["schemas"].update(bodies)
    content = described["paths"]["/infer"]["post"]["requestBody"]["content"]
    if classifier.takes_bytes:
        content[BYTES] = {"schema": {"type": "string", "format": "binary", "minLength": 1}}
    values = {"outputs": [*manifest.heads], "explain": choices(manifest)}
    operations = (one for path in described["paths"].values() for one in path.values())
    for parameter in (one for each in operations for one in each.get("parameters", ())):
        if (named := values.get(parameter["name"])) is not None:
            _name_values(parameter["schema"], named)


def _name_values(schema: Schema, values: Sequence[str]) -> None:
    """Put the values of a list into its schema; it stays empty if there are none."""
    schema["items"] = {"type": "string"}
    if len(values) <= MAX_NAMES:
        schema["items"]["enum"] = [*values] or [""]
    schema["maxItems"] = MAX_NAMES if values else 0


def _bodies(
    vocab_size: int | None,
    features: int,
    min_tokens: int,
    has_tokenizer: bool,
    extras: tuple[ExtraInput, ...],
) -> dict[str, Schema]:
    ids = ids_schema(vocab_size, min_tokens)
    one = {"text": TEXT_SCHEMA, "input_ids": ids}
    many = {"text": TEXT_SCHEMA, "texts": several(TEXT_SCHEMA), "input_ids": several(ids)}
    if not has_tokenizer:
        one, many = {"input_ids": ids}, {"input_ids": many["input_ids"]}
    if features:
        row = {"type": "array", "items": {"type": "number"}, "minItems": features}
        rows: Schema = {
            "type": "array",
            "items": row | {"maxItems": features},
            "minItems": min_tokens,
            "description": "Features of each token of one document.",
        }
        one, many = {"input_features": rows}, {"input_features": several(rows)}
    return {
        "DocumentRequest": _exactly_one(
            DocumentRequest, one, _fields_beside(one, extras, None), has_extras=bool(extras)
        ),
        "InferRequest": _exactly_one(
            InferRequest, many, _fields_beside(many, extras, ("text",)), has_extras=bool(extras)
        ),
    }


def _put_pairs(bodies: Mapping[str, Schema], extras: Sequence[ExtraInput]) -> None:
    """Put the second text beside each text, of which the tokenizer makes the types of tokens."""
    others = [extra for extra in extras if extra.name != TOKEN_TYPES]
    seconds = {"text": TEXT_SCHEMA, "texts": several(TEXT_SCHEMA)}
    fields = _fields_beside(seconds, others, ("text",))
    for form in (one for body in bodies.values() for one in body["oneOf"]):
        if (name := form["required"][0]) in seconds:
            form["required"] = [name, "text_pair", *(["inputs"] if others else [])]
            form["properties"] |= {"text_pair": seconds[name], "inputs": fields[name]}


def _fields_beside(
    forms: Mapping[str, Schema], extras: Sequence[ExtraInput], single: Sequence[str] | None
) -> dict[str, Schema]:
    """Return the schema of ``inputs`` beside each form."""
    is_single = {name: single is None or name in single for name in forms}
    if not extras:
        nothing: Schema = {"type": ["object", "null"], "maxProperties": 0}
        return {name: nothing if is_single[name] else {"type": "null"} for name in forms}
    fields: Schema = {
        "type": "object",
        "required": [extra.name for extra in extras],
        "properties": {extra.name: _values(extra) for extra in extras},
        "additionalProperties": False,
    }
    lists = several(fields)
    return {name: fields if is_single[name] else lists for name in forms}


def _values(extra: ExtraInput) -> Schema:
    whole = {} if extra.maximum is None else {"minimum": 0, "maximum": extra.maximum}
    limits: Schema = dict(whole)
    ends = {"minimum": extra.lowest, "maximum": extra.highest}
    limits |= {name: end for name, end in ends.items() if end is not None}
    one: Schema = {"type": "number" if extra.dtype == "float32" else "integer", **limits}
    if extra.kind == "token":
        return {"type": "array", "items": one, "description": "An integer of each token."}
    if extra.width is None:
        return one
    return {"type": "array", "items": one, "minItems": extra.width, "maxItems": extra.width}


def _exactly_one(
    model: type[BaseModel],
    forms: Mapping[str, Schema],
    fields: Mapping[str, Schema],
    *,
    has_extras: bool,
) -> Schema:
    """Return the schema of an object with exactly one of the forms; the others may be null."""
    absent = {name: {"type": "null"} for name in model.model_fields}
    alternatives = [
        {
            "type": "object",
            "required": [name, *(["inputs"] if has_extras else [])],
            "properties": absent | {name: schema} | {"inputs": fields[name]},
            "additionalProperties": False,
        }
        for name, schema in forms.items()
    ]
    return {"description": model.__doc__, "oneOf": alternatives}
