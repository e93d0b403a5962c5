"""A body that is a NumPy file (``.npy``) with one document: token ids, or features."""

import math
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from aftexport.errors import InputError
from aftserve.api.request_body import NotJsonError, check_encoding
from aftserve.api.streaming import body_parts
from aftserve.http.body_limits import BodyTooLargeError
from aftserve.http.content_codings import CODINGS, coding_of
from aftserve.model.classifier import Classifier
from aftserve.model.feature_tokens import FeatureSpace, FeatureTokens, FeatureWriter
from aftserve.model.npy_file import SAVE, NpyHeader, check_header, is_npy, parse_header

NPY = "application/x-npy"
_BLOCK_BYTES = 1 << 20
"""Bytes of the values that are converted at a time."""


async def read_npy(
    request: Request, classifier: Classifier, space: FeatureSpace, max_bytes: int
) -> NDArray[np.int64] | FeatureTokens:
    """Receive one document, and refuse it by its header before its values arrive.

    Args:
        request: a request whose body has not been received.
        classifier: the classifier with the features and the limits.
        space: space for the features of a large document.
        max_bytes: maximum size of the body.

    Raises:
        NotJsonError: if its encoding is unknown, or it is not a .npy file.
        InputError: if it is not a document of the model.
        DocumentTooLongError: if it has too many tokens.
        BodyTooLargeError: if it has too many bytes.
        BusyError: if the document does not fit now.
        StorageError: if the disk is full.
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
    check_header(header, classifier)
    _check_size(request, header, max_bytes)
    classifier.check_count(header.shape[0])
    if classifier.manifest.features is None:
        request.state.body.hold_values(8 * header.shape[0])
        blocks = [block async for block in _values(parts, rest, header)]
        return np.concatenate(blocks, dtype=np.int64)
    writer = FeatureWriter(classifier.manifest.features, header.shape[0], space)
    async for block in _values(parts, rest, header):
        writer.add(block)
    return writer.finish()


async def _header(parts: AsyncIterator[bytes]) -> tuple[NpyHeader, bytes]:
    """Return the header, and the values that arrived with it."""
    start = b""
    async for part in parts:
        start += part
        if not is_npy(start):
            raise NotJsonError(
                "The body must be a .npy file, got other bytes.",
                "Write it by numpy.save. Raw bytes need a model with the tokenizer bytes.",
            )
        if (header := parse_header(start)) is not None:
            return header, start[header.bytes :]
    raise InputError("The body must be a .npy file, got an incomplete header.", SAVE)


def _check_size(request: Request, header: NpyHeader, max_bytes: int) -> None:
    expected = header.bytes + header.array_bytes
    if expected > max_bytes:
        raise BodyTooLargeError(
            f"The body must have at most {max_bytes} bytes, got an array of {header.array_bytes}.",
            "Send a shorter document.",
        )
    announced = request.headers.get("content-length", "")
    is_compressed = coding_of(request.scope["headers"]) in CODINGS
    if not is_compressed and announced.isdigit() and int(announced) != expected:
        raise InputError(
            f"The body must have {expected} bytes by the header of the .npy file, got {announced}.",
            SAVE,
        )


async def _values(
    parts: AsyncIterator[bytes], rest: bytes, header: NpyHeader
) -> AsyncIterator[NDArray[Any]]:
    """Yield the values in blocks of whole rows."""
    row_bytes = header.dtype.itemsize * math.prod(header.shape[1:])
    pending, received = bytearray(rest), len(rest)

    def block() -> NDArray[Any]:
        whole = len(pending) // row_bytes * row_bytes
        values = np.frombuffer(pending[:whole], header.dtype)
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
            f"The array must have {header.array_bytes} bytes by its header, got {received}.", SAVE
        )
    if pending:
        yield block()


def _check_received(received: int, expected: int) -> None:
    if received > expected:
        raise InputError(f"The array must have {expected} bytes by its header, got more.", SAVE)
