"""The output that a request in another format asks for."""

from typing import Annotated

from fastapi import Query

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftexport.heads import (
    BinaryClassification,
    Head,
    MultiLabelClassification,
    SingleLabelClassification,
)
from aftserve.api.document_schemas import Schema
from aftserve.model.classifier import Classifier

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


def put_outputs(
    document: Schema, path: str, classifier: Classifier | None, *kinds: type[Head]
) -> None:
    """Put the heads that fit a path into an OpenAPI document; None if any model may answer."""
    names = heads_for_documents(classifier.manifest, *kinds) if classifier is not None else []
    for parameter in document["paths"][path]["post"]["parameters"]:
        if parameter["name"] == "output" and names:
            parameter["schema"] = {"type": "string", "enum": names}
            parameter["required"] = len(names) > 1
