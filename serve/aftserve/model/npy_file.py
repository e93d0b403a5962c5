"""A NumPy file (``.npy``) with one document: token ids, or features."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy

from aftexport.errors import InputError
from aftserve.model.classifier import Classifier
from aftserve.model.feature_tokens import FeatureSpace, FeatureWriter
from aftserve.types import Tokens

_MAGIC_BYTES = 8
_MAX_HEADER_BYTES = 10_000
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}
"""Bytes of the length of the header, by the version of the format."""
_READERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}
SAVE = "Write it by numpy.save."
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class NpyHeader:
    """The header of a file."""

    bytes: int  # size of the header in the file
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def array_bytes(self) -> int:
        """The size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_npy(start: bytes) -> bool:
    """Return whether a file begins as those of numpy.save, as far as it is known."""
    return start[: len(npy.MAGIC_PREFIX)] == npy.MAGIC_PREFIX[: len(start)]


def parse_header(start: bytes) -> NpyHeader | None:
    """Return the header at the start of a file; None if it is incomplete.

    Raises:
        InputError: if it is not a header of numpy.save.
    """
    if not is_npy(start):
        raise InputError("The document must be a .npy file, got other bytes.", SAVE)
    if len(start) < _MAGIC_BYTES:
        return None
    version = (start[6], start[7])
    if version not in _LENGTH_BYTES:
        raise InputError(
            f"The .npy file must have version 1.0 or 2.0, got {version[0]}.{version[1]}.", SAVE
        )
    values = _MAGIC_BYTES + _LENGTH_BYTES[version]
    if len(start) < values:
        return None
    size = int.from_bytes(start[_MAGIC_BYTES:values], "little")
    if size > _MAX_HEADER_BYTES:
        raise InputError(
            f"The header of the .npy file must have at most {_MAX_HEADER_BYTES} bytes, got {size}.",
            SAVE,
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
        raise InputError("The header of the .npy file is damaged.", SAVE) from error
    if is_fortran and len(shape) > 1:
        raise InputError(
            "The array must be in C order, got Fortran order.", "Save numpy.ascontiguousarray(x)."
        )
    if any(size < 0 for size in shape):
        raise InputError("The header of the .npy file is damaged.", SAVE)
    return NpyHeader(end, shape, dtype)


def check_header(header: NpyHeader, classifier: Classifier) -> None:
    """Raise InputError if an array is not a document of the model, by its type and its axes."""
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


def read_npy_file(path: Path, classifier: Classifier, folder: Path | None) -> Tokens:
    """Return the checked document in a file, which is read in blocks.

    Raises:
        InputError: if it is not a document of the model.
        DocumentTooLongError: if it has too many tokens.
        StorageError: if the disk is full.
        OSError: if it cannot be read.
    """
    # folder: for the features of a large document; None for that of the system
    with path.open("rb") as file:
        header = parse_header(file.read(_MAGIC_BYTES + 4 + _MAX_HEADER_BYTES))
        if header is None:
            raise InputError("The document must be a .npy file, got an incomplete header.", SAVE)
        check_header(header, classifier)
        classifier.check_count(header.shape[0])
        if (size := path.stat().st_size) != header.bytes + header.array_bytes:
            raise InputError(
                f"The .npy file must have {header.bytes + header.array_bytes} bytes by its header, "
                f"got {size}.",
                SAVE,
            )
        file.seek(header.bytes)
        features = classifier.manifest.features
        if features is None:
            return classifier.check(np.fromfile(file, header.dtype).astype(np.int64))
        tokens, width = header.shape
        writer = FeatureWriter(features, tokens, FeatureSpace(folder, sys.maxsize))
        rows = max(1, _BLOCK_BYTES // (header.dtype.itemsize * width))
        for start in range(0, tokens, rows):
            count = min(rows, tokens - start) * width
            writer.add(np.fromfile(file, header.dtype, count).reshape(-1, width))
        return writer.finish()
