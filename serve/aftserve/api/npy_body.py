"""A body that is a NumPy file (``.npy``) with one document: token ids, or features."""

import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from io import BytesIO
from tokenize import TokenError
from typing import Any

import numpy as np
from fastapi import Request
from numpy.lib import format as npy
from numpy.typing import NDArray

from aftexport.errors import InputError
from aftserve.api.request_body import NotJsonError, check_encoding
from aftserve.api.streaming import body_parts
from aftserve.http.body_limits import BodyTooLargeError
from aftserve.model.classifier import Classifier
from aftserve.model.feature_tokens import FeatureSpace, FeatureTokens, FeatureWriter

NPY = "application/x-npy"
_MAGIC_BYTES = 8
_MAX_HEADER_BYTES = 10_000
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}
"""Bytes of the length of the header, by the version of the format."""
_READERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}
_SAVE = "Write the body by numpy.save."
_BLOCK_BYTES = 1 << 20
"""Bytes of the values that are converted at a time."""


@dataclass(frozen=True)
class _Header:
    """The header of a file.

    Attributes:
        bytes: size of the header in the file.
        shape: the shape of the array.
        dtype: the type of its values.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def array_bytes(self) -> int:
        """The size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


async def read_npy(
    request: Request, classifier: Classifier, space: FeatureSpace, max_bytes: int
) -> NDArray[np.int64] | FeatureTokens:
    """Receive one document, and refuse it by its header before its values arrive.

    Args:
        request: a request whose body has not been received.
        classifier: the classifier with the features and the limits.
        space: space for the features of a large document.
        max_bytes: maximum size of a body with features.

    Raises:
        NotJsonError: if it is compressed, or not a .npy file.
        InputError: if it is not a document of the model.
        DocumentTooLongError: if it has too many tokens.
        BodyTooLargeError: if it has too many bytes.
        BusyError: if there is no space for the document now.
        ClientGoneError: if the client left before the end of the body.
    """
    check_encoding(request)
    if classifier.needs_words:
        raise NotJsonError(f"This model needs the words of a text, got {NPY}.", "Send text/plain.")
    if classifier.manifest.features is not None:
        # The values go to a file as they arrive, so they do not count as held.
        request.state.body.allow(max_bytes)
    parts = body_parts(request)
    header, rest = await _header(parts)
    _check_shape(header, classifier)
    _check_size(request, header, max_bytes)
    classifier.check_count(header.shape[0])
    if classifier.manifest.features is None:
        blocks = [block async for block in _values(parts, rest, header)]
        return np.concatenate(blocks).astype(np.int64) if blocks else np.empty(0, np.int64)
    writer = FeatureWriter(classifier.manifest.features, header.shape[0], space)
    async for block in _values(parts, rest, header):
        writer.add(block)
    return writer.finish()


async def _header(parts: AsyncIterator[bytes]) -> tuple[_Header, bytes]:
    """Return the header, and the values that arrived with it."""
    start = b""
    async for part in parts:
        start += part
        if (header := _parsed(start)) is not None:
            return header, start[header.bytes :]
    raise InputError("The body must be a .npy file, got an incomplete header.", _SAVE)


def _parsed(start: bytes) -> _Header | None:
    """Return the header at the start of a file; None if it is incomplete."""
    if start[: len(npy.MAGIC_PREFIX)] != npy.MAGIC_PREFIX[: len(start)]:
        raise NotJsonError(
            "The body must be a .npy file, got other bytes.",
            "Write it by numpy.save. Raw bytes need a model with the tokenizer bytes.",
        )
    if len(start) < _MAGIC_BYTES:
        return None
    version = (start[6], start[7])
    if version not in _LENGTH_BYTES:
        raise InputError(
            f"The .npy file must have version 1.0 or 2.0, got {version[0]}.{version[1]}.", _SAVE
        )
    values = _MAGIC_BYTES + _LENGTH_BYTES[version]
    if len(start) < values:
        return None
    size = int.from_bytes(start[_MAGIC_BYTES:values], "little")
    if size > _MAX_HEADER_BYTES:
        raise InputError(
            f"The header of the .npy file must have at most {_MAX_HEADER_BYTES} bytes, got {size}.",
            _SAVE,
        )
    end = values + size
    if len(start) < end:
        return None
    try:
        # The header is a literal; objects would need pickle, which is never read.
        shape, is_fortran, dtype = _READERS[version](
            BytesIO(start[_MAGIC_BYTES:end]), max_header_size=_MAX_HEADER_BYTES
        )
    except (ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise InputError("The header of the .npy file is damaged.", _SAVE) from error
    if is_fortran and len(shape) > 1:
        raise InputError(
            "The array must be in C order, got Fortran order.", "Save numpy.ascontiguousarray(x)."
        )
    if any(size < 0 for size in shape):
        raise InputError("The header of the .npy file is damaged.", _SAVE)
    return _Header(end, shape, dtype)


def _check_shape(header: _Header, classifier: Classifier) -> None:
    """Raise InputError if an array is not a document of the model."""
    features = classifier.manifest.features
    got = f"{header.dtype} {list(header.shape)}"
    if features is None:
        if header.dtype.kind != "i" or header.dtype.itemsize < 4 or len(header.shape) != 1:
            raise InputError(
                f"The array must be token ids int64 [tokens], got {got}.",
                "Save the ids of one document as int64 or int32.",
            )
    elif header.dtype.kind != "f" or len(header.shape) != 2 or header.shape[1] != features.count:
        raise InputError(
            f"The array must be features float32 [tokens, {features.count}], got {got}.",
            f"Save {features.count} numbers for each token of one document, as float32.",
        )


def _check_size(request: Request, header: _Header, max_bytes: int) -> None:
    expected = header.bytes + header.array_bytes
    if expected > max_bytes:
        raise BodyTooLargeError(
            f"The body must have at most {max_bytes} bytes, got an array of {header.array_bytes}.",
            "Send a shorter document.",
        )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) != expected:
        raise InputError(
            f"The body must have {expected} bytes by the header of the .npy file, got {announced}.",
            _SAVE,
        )


async def _values(
    parts: AsyncIterator[bytes], rest: bytes, header: _Header
) -> AsyncIterator[NDArray[Any]]:
    """Yield the values in blocks of whole rows."""
    row_bytes = header.dtype.itemsize * math.prod(header.shape[1:])
    pending, received = bytearray(rest), len(rest)

    def block() -> NDArray[Any]:
        whole = len(pending) // row_bytes * row_bytes
        values = np.frombuffer(bytes(pending[:whole]), header.dtype)
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
            f"The array must have {header.array_bytes} bytes by its header, got {received}.", _SAVE
        )
    if pending:
        yield block()


def _check_received(received: int, expected: int) -> None:
    if received > expected:
        raise InputError(f"The array must have {expected} bytes by its header, got more.", _SAVE)
