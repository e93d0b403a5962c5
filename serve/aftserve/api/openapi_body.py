"""The part of a route's OpenAPI description that names its request body."""

from collections.abc import Callable, Sequence
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


def body_schema(model: type[BaseModel], **others: Schema) -> dict[str, Any]:
    """Return a route's description of a body that the endpoint reads itself.

    Args:
        model: model of the JSON body.
        others: schemas of other bodies, by content type.
    """
    json = {"schema": {"$ref": COMPONENTS + model.__name__}}
    content = {"application/json": json} | {kind: {"schema": s} for kind, s in others.items()}
    return {"requestBody": {"required": True, "content": content}}
