"""Documents and extra inputs from Python, as a request has them; apart, as it runs no model."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aftexport.errors import InputError
from aftserve.client.request import is_pair
from aftserve.types import Document, Text, TextPair


def checked_document(document: Any) -> Document | InputError:
    """Return a document in the form of a request, or the error of its type."""
    if isinstance(document, Text):
        return document
    if is_pair(document):
        return TextPair(*document)
    if isinstance(document, np.ndarray):
        if document.ndim == 1 and document.dtype.kind in "iu":
            return document.astype(np.int64)
        if document.ndim == 2 and document.dtype.kind in "fiu":
            return document.astype(np.float64) if document.dtype.kind != "f" else document
        return InputError(
            "An array must have integers [tokens] or numbers [tokens, features], got "
            f"{document.dtype} {list(document.shape)}.",
            "Give one array for each document.",
        )
    if not isinstance(document, Sequence) or isinstance(document, bytes | bytearray):
        return InputError(
            "A document must be a text, a tuple of two texts, token ids or features, got "
            f"{type(document).__name__}.",
            "Convert it.",
        )
    if document and isinstance(document[0], Sequence | np.ndarray):
        return _checked_rows(document)
    try:
        return list(map(operator.index, document))
    except TypeError as error:
        return InputError(f"Token ids must be integers ({error}).", "Convert them.")


def _checked_rows(document: Sequence[Any]) -> Document | InputError:
    """Return rows of features as lists, or the error of the first other row."""
    rows = []
    for token, row in enumerate(document):
        if isinstance(row, np.ndarray) and row.ndim == 1:
            rows.append(row.tolist())
        elif isinstance(row, Sequence) and not isinstance(row, str | bytes | bytearray):
            rows.append(_plain([*row]))
        else:
            got = (
                f"an array {list(row.shape)}" if isinstance(row, np.ndarray) else type(row).__name__
            )
            return InputError(
                f"Features must be a list of numbers for each token, got {got} for token {token}.",
                "Give lists or vectors of numbers, or only token ids.",
            )
    return rows


def _plain(value: Any) -> Any:
    """Return a value with Python's numbers and lists, as ``Client`` would send it in JSON."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        return value
    if isinstance(value, list | tuple):
        if {int, float}.issuperset(map(type, value)):
            return [*value]
        return [one.tolist() if hasattr(one, "tolist") else one for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def plain_fields(given: Any) -> Any:
    """Return extra inputs with plain values; another type than a mapping is refused later."""
    if not isinstance(given, Mapping):
        return given
    return {name: _plain(value) for name, value in given.items()}
