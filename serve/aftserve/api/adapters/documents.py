"""The documents in a field of a body: texts, or token ids."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from aftexport.errors import InputError
from aftserve.api.request_body import invalid, kind_of
from aftserve.errors import DocumentTooLongError
from aftserve.schemas import TokenIds
from aftserve.types import Document

T = TypeVar("T")
_IDS: TypeAdapter[list[int]] = TypeAdapter(TokenIds)


def documents_of(given: Any, field: str, max_documents: int) -> list[Document]:
    """Return the documents of a field: a text, token ids, or a list of either."""
    if is_document(given):
        return [document_of(given, (field,))]
    if not isinstance(given, list | np.ndarray) or not len(given):
        raise InputError(
            f"{field} must be a text, token ids, or a list of them, got "
            f"{'an empty array' if isinstance(given, list) else kind_of(given)}.",
            "Send at least one document.",
        )
    check_count(len(given), field, max_documents)
    return [document_of(one, (field, index)) for index, one in enumerate(given)]


def is_document(given: Any) -> bool:
    """Return whether a JSON value is one document: a text, or a list of numbers."""
    if isinstance(given, np.ndarray):
        return given.ndim == 1
    if isinstance(given, list):
        return bool(given) and isinstance(given[0], int | float)
    return isinstance(given, str)


def check_count(count: int, field: str, max_documents: int) -> None:
    """Raise DocumentTooLongError if a list has too many documents."""
    if count > max_documents:
        raise DocumentTooLongError(
            f"{field} must have at most {max_documents} documents, got {count}.",
            "Send them in several requests.",
        )


def document_of(given: Any, place: Sequence[str | int]) -> Document:
    """Return one document, a text or token ids; errors name its place in the body."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list | np.ndarray):
        raise InputError(
            f"{'.'.join(map(str, place))} must be a text or token ids, got {kind_of(given)}.",
            "Send documents of these two forms only.",
        )
    return validated(_IDS, given, place)


def validated(kind: TypeAdapter[T], given: Any, place: Sequence[str | int]) -> T:
    """Return a value of a body; RequestValidationError names its place if it does not fit."""
    try:
        return kind.validate_python(given)
    except ValidationError as error:
        raise invalid(error, place) from None
