"""Schemas of request bodies and documents in the OpenAPI document, with the limits of a bundle."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from aftserve.model.classifier import Classifier

COMPONENTS = "#/components/schemas/"
Schema = dict[str, Any]
Describe = Callable[[Schema, Classifier | None, Sequence[str]], None]
"""A function that puts the limits of a model into an OpenAPI document.

It gets the document, the classifier of the model, and the names of the models that a request may
name. Without a model, which is None, the document has no limits. The names are empty if the
document leaves them out.
"""
# Name no maximum length: a document that is too long gets 413, and GET /info has the limits.
TEXT: Schema = {"type": "string", "minLength": 1}
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
        return [TEXT, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}]
    manifest = classifier.manifest
    if manifest.features is not None or manifest.extra_inputs:
        return []
    ids = ids_schema(manifest.vocab_size, classifier.min_tokens)
    return [*([TEXT] if classifier.has_tokenizer else []), ids]


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
