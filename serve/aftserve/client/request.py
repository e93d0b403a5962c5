"""The parts of a request to ``/infer``: its path, headers and body."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from aftserve.client.array_body import Array, ArrayBody
from aftserve.client.errors import DeadlineError, InvalidRequestError

Fields = Mapping[str, Any]
"""The extra inputs of one document by name."""
Names = str | Sequence[str]
"""One name, or several."""

JSON = "application/json"


def check_one_given(documents: object, features: object) -> None:
    """Raise TypeError unless exactly one of both is given."""
    if (documents is None) == (features is None):
        raise TypeError("give exactly one of documents and features")


def single_body(
    document: str | Sequence[int] | None, features: Array | None, inputs: Fields | None
) -> tuple[str, bytes | ArrayBody]:
    """Return the media type and the body of a request with one document."""
    if features is not None and inputs is None:
        body = ArrayBody(features)
        return body.content_type, body
    content: dict[str, Any] = {"text": document, "inputs": inputs}
    if not isinstance(document, str):
        name, value = ("input_ids", document) if features is None else ("input_features", features)
        content = {name: [value], "inputs": None if inputs is None else [inputs]}
    return JSON, to_json({name: value for name, value in content.items() if value is not None})


def line_of(
    document: str | Sequence[int] | Array, fields: Iterator[Fields] | None, name: str | None
) -> bytes:
    """Return a line with a document and the next extra inputs.

    Args:
        document: the document.
        fields: the extra inputs of all documents left; None without any.
        name: the document's field; None for that of a text or of token ids.
    """
    name = name or ("text" if isinstance(document, str) else "input_ids")
    content: dict[str, Any] = {name: document}
    if fields is not None:
        if (given := next(fields, None)) is None:
            raise ValueError("inputs must have an entry for each document, got fewer")
        content["inputs"] = given
    return to_json(content)


def query_of(evidence: int, explain: Names, outputs: Names) -> str:
    """Return the query of a request for some evidence and some outputs; empty for the default."""
    pairs: list[tuple[str, str | int]] = [("evidence", evidence)] if evidence else []
    for name, values in (("explain", explain), ("outputs", outputs)):
        pairs += [(name, value) for value in ([values] if isinstance(values, str) else values)]
    return urlencode(pairs)


def path_and_headers(content_type: str, query: str, left: float) -> tuple[str, dict[str, str]]:
    """Return the path and the headers of a request with ``left`` seconds for its answer."""
    if left <= 0:
        raise DeadlineError("The deadline passed before the request was sent.")
    path = f"/infer?{query}" if query else "/infer"
    return path, {"Content-Type": content_type, "Deadline-Seconds": f"{left:.6f}"}


def to_json(content: Mapping[str, Any]) -> bytes:
    """Return JSON of a mapping, with arrays as lists.

    Raises:
        InvalidRequestError: if a value is of another type.
    """
    return json.dumps(content, default=_to_list).encode()


def _to_list(value: Any) -> Any:
    """Convert an array to a list, and a mapping of another type to a dict."""
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return value.tolist()
    except AttributeError:
        raise InvalidRequestError(
            f"A document must be text or token ids, got {type(value).__name__}."
        ) from None
