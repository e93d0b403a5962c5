"""Conversion of tensors between arrays and JSON or bytes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.errors import InputError
from aftserve.api.open_inference.schemas import Datatype, InputTensor

Array = NDArray[Any]

_INTEGERS: dict[str, str] = {"INT64": "<i8", "INT32": "<i4"}


def read(tensor: InputTensor, binary: memoryview | None) -> Array:
    """Return a tensor as an array of integers, of floats, or of ``str`` objects."""
    count = math.prod(tensor.shape)
    if binary is not None:
        values = (
            _strings(binary, tensor) if tensor.datatype == "BYTES" else _numbers(binary, tensor)
        )
    elif tensor.data is None:
        raise InputError(
            f"The input {tensor.name!r} has no data.", "Send data or binary_data_size."
        )
    else:
        values = _listed(tensor)
    if values.size != count:
        raise InputError(
            f"The input {tensor.name!r} must have {count} values by its shape {tensor.shape}, "
            f"got {values.size}.",
            "Correct the shape or the values.",
        )
    return values.reshape(tensor.shape)


def _numbers(binary: memoryview, tensor: InputTensor) -> Array:
    kind = np.dtype("<f4" if tensor.datatype == "FP32" else _integers(tensor))
    if len(binary) % kind.itemsize:
        raise InputError(
            f"The input {tensor.name!r} must have {kind.itemsize} bytes for each value, got "
            f"{len(binary)} bytes.",
            "Send whole values, little-endian.",
        )
    return np.frombuffer(binary, kind)


def _strings(binary: memoryview, tensor: InputTensor) -> Array:
    found, place, count = list[str](), 0, math.prod(tensor.shape)
    while place < len(binary):
        if len(found) == count:
            raise InputError(
                f"The input {tensor.name!r} has more values than its shape {tensor.shape}.",
                "Correct the shape or the values.",
            )
        start = place + 4
        place = start + int.from_bytes(binary[place:start], "little")
        if place > len(binary):
            raise InputError(
                f"The input {tensor.name!r} ends within a value.",
                "Send four bytes of length, little-endian, before each.",
            )
        found.append(_decoded(bytes(binary[start:place]), tensor))
    return np.array(found, dtype=object)


def _decoded(value: bytes, tensor: InputTensor) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"The input {tensor.name!r} is not UTF-8: {error}.", "Send UTF-8."
        ) from None


def _listed(tensor: InputTensor) -> Array:
    data: Any = [] if tensor.data is None else tensor.data
    for size in tensor.shape[1:]:
        is_array = isinstance(data, np.ndarray)
        if not (data.ndim > 1 if is_array else _is_nested(data)):
            break
        if data.shape[1] != size if is_array else any(len(row) != size for row in data):
            raise InputError(
                f"Every row of the input {tensor.name!r} must have {size} values.",
                "Send rows of one length, and lengths beside them.",
            )
        data = _flattened(data)
    if tensor.datatype == "BYTES":
        if not all(isinstance(value, str) for value in data):
            raise InputError(f"The input {tensor.name!r} must hold only texts.", "Send strings.")
        return np.array(data, dtype=object)
    if tensor.datatype == "FP32":
        return _floats(tensor, data)
    kind = _integers(tensor)
    if isinstance(data, np.ndarray) and (data.dtype.kind == "i" or not data.size):
        least, most = np.iinfo(kind).min, np.iinfo(kind).max
        if not data.size or (data.min() >= least and data.max() <= most):
            return data.astype(kind)
        data = [int(data.min()), int(data.max())]  # one of them is outside the range
    # bool is a subclass of int, and an array would round a float.
    if not all(type(value) is int for value in data):
        raise InputError(f"The input {tensor.name!r} must hold only integers.", "Send integers.")
    try:
        return np.array(data, dtype=kind)
    except OverflowError:
        raise InputError(
            f"The input {tensor.name!r} has a value outside the range of {tensor.datatype}.",
            "Send integers in this range.",
        ) from None


def _is_nested(data: list[Any]) -> bool:
    return bool(data) and all(isinstance(row, list | np.ndarray) for row in data)


def _flattened(rows: Any) -> Any:
    """Return the values of rows of one length; large bodies have arrays in place of lists."""
    if isinstance(rows, np.ndarray):
        return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])
    if all(isinstance(row, np.ndarray) for row in rows):
        return np.concatenate(rows)
    return [value for row in rows for value in row]


def _floats(tensor: InputTensor, data: list[Any] | Array) -> Array:
    if isinstance(data, np.ndarray):
        return data.astype(np.float64)
    if not {int, float}.issuperset(map(type, data)):
        raise InputError(f"The input {tensor.name!r} must hold only numbers.", "Send numbers.")
    try:
        return np.array(data, np.float64)
    except OverflowError:
        raise InputError(
            f"The input {tensor.name!r} has a value outside the range of FP32.",
            "Send numbers in this range.",
        ) from None


def _integers(tensor: InputTensor) -> str:
    if tensor.datatype not in _INTEGERS:
        raise InputError(
            f"The input {tensor.name!r} must be INT64 or INT32, got {tensor.datatype}.",
            "Send INT64 or INT32.",
        )
    return _INTEGERS[tensor.datatype]


_OUTPUTS: dict[str, str] = {**_INTEGERS, "BOOL": "?", "FP32": "<f4"}


def dtype_of(datatype: Datatype) -> "np.dtype[Any]":
    """Return the type of a tensor of numbers in NumPy."""
    return np.dtype(_OUTPUTS[datatype])


def to_bytes(values: Sequence[str] | Array, datatype: Datatype) -> bytes:
    """Return a tensor's bytes: little-endian, with its length before each string."""
    if datatype == "BYTES":
        encoded = [str(value).encode() for value in values]
        return b"".join(len(value).to_bytes(4, "little") + value for value in encoded)
    return np.asarray(values, dtype=dtype_of(datatype)).tobytes()
