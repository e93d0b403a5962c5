"""The part of a route's OpenAPI description that names its request body."""

from typing import Any

from pydantic import BaseModel

COMPONENTS = "#/components/schemas/"
Schema = dict[str, Any]


def body_schema(model: type[BaseModel], **others: Schema) -> dict[str, Any]:
    """Return a route's description of a body that the endpoint reads itself.

    Args:
        model: model of the JSON body.
        others: schemas of other bodies, by content type.
    """
    json = {"schema": {"$ref": COMPONENTS + model.__name__}}
    content = {"application/json": json} | {kind: {"schema": s} for kind, s in others.items()}
    return {"requestBody": {"required": True, "content": content}}
