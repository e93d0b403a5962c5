"""The parts of a request to ``/infer``: its path, headers and body."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard
from urllib.parse import urlencode

from aftserve.client.results import DeadlineError, InvalidRequestError

_PART_BYTES = 1 << 20
_ALIGNMENT = 64
Fields = Mapping[str, Any]
"""The extra inputs of one document by name."""
Names = str | Sequence[str]
"""One name, or several."""
JSON = "application/json"


class Array(Protocol):
    """An array of NumPy, or one with the same methods."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        ...

    @property
    def dtype(self) -> Any:
        """The type of the values."""
        ...

    def __getitem__(self, rows: slice, /) -> Any:
        """Return some rows."""
        ...


class ArrayBody:
    """The bytes of one document of features ``[tokens, features]``, sent as float32."""

    # It can be sent several times. ValueError means that the features are not such an array.

    content_type = "application/x-npy"

    def __init__(self, features: Array) -> None:
        shape, dtype = getattr(features, "shape", None), getattr(features, "dtype", None)
        if shape is None or len(shape) != 2 or getattr(dtype, "kind", "") not in ("f", "i", "u"):
            found = f"{dtype} {list(shape)}" if shape is not None else type(features).__name__
            raise ValueError(
                f"features must be an array of numbers [tokens, features], got {found}"
            )
        self._array = features
        self._tokens, self._width = (int(size) for size in shape)
        self._header = _header(self._tokens, self._width)

    def __len__(self) -> int:
        """Return the number of bytes."""
        return len(self._header) + 4 * self._tokens * self._width

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes in parts, so that a large array is never copied as a whole."""
        yield self._header
        rows = max(1, _PART_BYTES // (4 * max(1, self._width)))
        for start in range(0, self._tokens, rows):
            yield self._array[start : start + rows].astype("<f4").tobytes()


def _header(tokens: int, width: int) -> bytes:
    """Return the header of version 1.0, whose length is a multiple of 64."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({tokens}, {width}), }}"
    size = len(text) + 1
    size += -(10 + size) % _ALIGNMENT
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + f"{text:<{size - 1}}\n".encode()


Pair = tuple[str, str]
"""A text and its second text, which are one document."""


def is_pair(document: object) -> TypeGuard[Pair]:
    """Return whether a document is a pair of texts."""
    return isinstance(document, tuple) and list(map(type, document)) == [str, str]


def check_one_given(documents: object, features: object) -> None:
    """Raise TypeError unless exactly one of both is given."""
    if (documents is None) == (features is None):
        raise TypeError("give exactly one of documents and features")


def single_body(
    document: str | Pair | Sequence[int] | None, features: Array | None, inputs: Fields | None
) -> tuple[str, bytes | ArrayBody]:
    """Return the media type and the body of a request with one document."""
    if features is not None and inputs is None:
        body = ArrayBody(features)
        return body.content_type, body
    content: dict[str, Any] = {"text": document, "inputs": inputs}
    if is_pair(document):
        content |= dict(zip(("text", "text_pair"), document, strict=True))
    elif not isinstance(document, str):
        name, value = ("input_ids", document) if features is None else ("input_features", features)
        content = {name: [value], "inputs": None if inputs is None else [inputs]}
    return JSON, to_json({name: value for name, value in content.items() if value is not None})


def line_of(
    document: str | Pair | Sequence[int] | Array, fields: Iterator[Fields] | None, name: str | None
) -> bytes:
    """Return a line with a document in the field ``name``, and the next extra inputs."""
    name = name or ("text" if isinstance(document, str) else "input_ids")
    content: dict[str, Any] = {name: document}
    if is_pair(document):
        content = dict(zip(("text", "text_pair"), document, strict=True))
    if fields is not None:
        if (given := next(fields, None)) is None:
            raise ValueError("inputs must have an entry for each document, got fewer")
        content["inputs"] = given
    return to_json(content)


def query_of(evidence: int, tokens: int, checks: int, explain: Names, outputs: Names) -> str:
    """Return the query of a request for some evidence and some outputs; empty for the default."""
    numbers = (("evidence", evidence, 0), ("evidence_tokens", tokens, 64))
    pairs: list[tuple[str, str | int]] = [
        (name, number)
        for name, number, default in (*numbers, ("evidence_check", checks, 0))
        if number != default
    ]
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
    """Return JSON of a mapping, with arrays as lists; InvalidRequestError for other values."""
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
