"""A ModelInferRequest whose values are not parsed by protobuf.

Protobuf makes an object of some hundred bytes of each value of two bytes. Here, the fields of the
message are found one after the other, and the values stay where they are until their count is
known. Only names, shapes and parameters are parsed by protobuf.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aftexport.errors import InputError
from aftserve.grpc.wire_types import MESSAGES, not_a_message, parse

_NAME = "ModelInferRequest"
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
_MAX_FIELDS = 1 << 14
"""Maximum number of fields, as each takes time: packed values are one field."""
_MAX_PLAIN_BYTES = 1 << 18
"""Maximum bytes of names, shapes and parameters together."""
_BLOCK_BYTES = 1 << 20
"""Bytes of values that are read at once."""


def _numbers(name: str) -> dict[str, int]:
    message = MESSAGES[_NAME].DESCRIPTOR
    for part in name.split("."):
        message = message.fields_by_name[part].message_type if part else message
    return {one.name: one.number for one in message.fields}


_OF_REQUEST, _OF_INPUT, _OF_CONTENTS = map(_numbers, ("", "inputs", "inputs.contents"))
_CONTENTS_NAMES = {number: name for name, number in _OF_CONTENTS.items()}
_KINDS = {"bytes_contents": _LENGTH, "fp32_contents": _FIXED32, "fp64_contents": _FIXED64}
"""The wire types of values that are not varints."""


Contents = Mapping[str, Sequence[memoryview]]
"""The values of an input by the name of their field: each of ``bytes_contents``, packed others."""


class _Field(NamedTuple):
    """A field of a message, by its places in the bytes."""

    number: int
    kind: int  # wire type
    start: int  # of its tag
    value: int  # start of its value, without the length
    end: int


@dataclass
class InferRequest:
    """A request."""

    message: Any
    contents: Sequence[Contents]
    raw: Sequence[memoryview]


def split_request(content: bytes) -> InferRequest:
    """Return the request of a message."""
    return _Splitter(content).split()


@dataclass
class _Splitter:
    """The bytes of one message."""

    content: bytes
    fields_left: int = _MAX_FIELDS

    def split(self) -> InferRequest:
        """Return the request."""
        view, raw, contents = memoryview(self.content), list[memoryview](), list[Contents]()
        plain, size = list[bytes](), 0
        for one in self._fields(0, len(self.content)):
            if one[:2] == (_OF_REQUEST["raw_input_contents"], _LENGTH):
                raw.append(view[one.value : one.end])
                continue
            if one[:2] == (_OF_REQUEST["inputs"], _LENGTH):
                values, rest = self._split_input(one)
                contents.append(values)
                part = _varint(one.number << 3 | _LENGTH) + _varint(len(rest)) + rest
            else:
                part = self.content[one.start : one.end]
            plain.append(part)
            size += len(part)
            if size > _MAX_PLAIN_BYTES:
                raise InputError(
                    f"Expected at most {_MAX_PLAIN_BYTES} bytes of names, shapes and parameters, "
                    "got more.",
                    "Send shorter ones.",
                )
        return InferRequest(parse(_NAME, b"".join(plain)), contents, raw)

    def _split_input(self, given: _Field) -> tuple[Contents, bytes]:
        """Return the values of an input, and the bytes of the rest of it."""
        values: dict[str, list[memoryview]] = {}
        rest = []
        for one in self._fields(given.value, given.end):
            if one[:2] == (_OF_INPUT["contents"], _LENGTH):
                self._add_values(one, values)
            else:
                rest.append(self.content[one.start : one.end])
        return values, b"".join(rest)

    def _add_values(self, given: _Field, values: dict[str, list[memoryview]]) -> None:
        """Add the values of an InferTensorContents; packed ones, or one in each field."""
        view = memoryview(self.content)
        for one in self._fields(given.value, given.end):
            name = _CONTENTS_NAMES.get(one.number, "")
            kind = _KINDS.get(name, _VARINT)
            # Protobuf ignores fields that are unknown or of another type.
            if name and one.kind in (kind, _LENGTH) and (one.value < one.end or kind == _LENGTH):
                values.setdefault(name, []).append(view[one.value : one.end])

    def _fields(self, start: int, end: int) -> Iterator[_Field]:
        """Yield the fields between two places."""
        while start < end:
            self.fields_left -= 1
            if self.fields_left < 0:
                raise InputError(
                    f"Expected a message of at most {_MAX_FIELDS} fields, got more.",
                    "Send raw_input_contents, or packed contents and fewer documents.",
                )
            tag, value = self._read_varint(start)
            number, kind = tag >> 3, tag & 7
            if kind == _LENGTH:
                size, value = self._read_varint(value)
                stop = value + size
            elif kind == _VARINT:
                _, stop = self._read_varint(value)
            elif kind in _FIXED_BYTES:
                stop = value + _FIXED_BYTES[kind]
            else:
                raise not_a_message(_NAME)
            if stop > end or number == 0:
                raise not_a_message(_NAME)
            yield _Field(number, kind, start, value, stop)
            start = stop

    def _read_varint(self, place: int) -> tuple[int, int]:
        """Return the number at a place, and the place behind it."""
        number = 0
        for index, byte in enumerate(self.content[place : place + _MAX_VARINT_BYTES]):
            number |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return number, place + index + 1
        raise not_a_message(_NAME)


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def expanded_size(parts: Sequence[memoryview], kind: "np.dtype[Any]") -> int:
    """Return the number of bytes that packed values take once they are read, at most."""
    if kind.kind == "f":
        return sum(map(len, parts))
    # The last byte of each number, which is read as INT64, has no sign.
    return 8 * sum(int(np.count_nonzero(np.frombuffer(part, np.int8) >= 0)) for part in parts)


def read_numbers(parts: Sequence[memoryview], kind: "np.dtype[Any]") -> NDArray[Any]:
    """Return packed values as an array.

    Raises:
        InputError: if they end within a number.
    """
    content = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
    if kind.kind == "f":
        if len(content) % kind.itemsize:
            raise not_a_message(_NAME)
        return np.frombuffer(content, kind)
    found, place = [np.empty(0, kind)], 0
    while place < len(content):
        block = np.frombuffer(content[place : place + _BLOCK_BYTES], np.uint8)
        ends = np.flatnonzero(block < 0x80)
        if not len(ends):
            raise not_a_message(_NAME)
        found.append(_varints(block, ends).astype(kind))
        place += int(ends[-1]) + 1
    return np.concatenate(found)


def _varints(block: NDArray[np.uint8], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers that end at these places of a block.

    Raises:
        InputError: if one is too long.
    """
    sizes = np.diff(ends, prepend=-1)
    starts, longest = ends - sizes + 1, int(sizes.max())
    if longest > _MAX_VARINT_BYTES:
        raise not_a_message(_NAME)
    numbers = np.zeros(len(ends), np.uint64)
    for index in range(longest):
        here = np.flatnonzero(sizes > index)
        bits = (block[starts[here] + index] & 0x7F).astype(np.uint64)
        numbers[here] |= bits << np.uint64(7 * index)
    return numbers.view(np.int64)
