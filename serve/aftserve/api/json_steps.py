"""JSON bodies in steps, between which other connections have their turn.

A parser holds the interpreter's lock until it is done, so a thread would not free the event loop.
Numbers are most of a large body. Their lists become arrays: a list of Python's numbers takes
several times the memory of the body.
"""

import re
from collections.abc import Callable, Generator, Mapping
from sys import getsizeof
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from aftexport.errors import InputError
from aftexport.system.process import collection_paused
from aftserve.errors import DocumentTooLongError

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields at least once in about a millisecond."""

MAX_VALUES = 1 << 18
"""Maximum values of a body beside numbers in lists, such as texts, lists and objects.

The largest requests of the interfaces have fewer: ``/v1/decisions`` takes 400 questions of 255
choices.
"""
_MAX_DEPTH = 32
_MAX_AXES = 3
"""Axes of the largest arrays: documents, tokens and features."""
_NUMBER_BYTES = 1 << 13
_TEXT_BYTES = 1 << 14
"""Bytes that one step parses."""
_MIN_ARRAY_BYTES = 64
"""An array takes more time than the numbers of a shorter list."""
_STEP_VALUES = 64
_MAX_LISTED = 64
"""Arrays up to this length become lists in objects, for fields such as the shape of a tensor."""

_SPACE = re.compile(rb"[ \t\n\r]*+")
_NUMBERS = re.compile(rb"[0-9.eE+\-,\[\] \t\n\r]*+")
_SCALAR = re.compile(rb"[0-9a-zA-Z.+\-]*+")
_CHARACTERS = re.compile(
    rb"""(?: [^"\\]++
           | \\[^u]
           | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
           | \\u[0-9a-fA-F]{4}\\u[0-9a-fA-F]{4}  # a surrogate pair
         )*+""",
    re.DOTALL | re.VERBOSE,
)
"""A part of a string that ends between two characters, but perhaps within the UTF-8 of one."""


def parse_in_steps(
    body: bytes, hold: Callable[[int], None], max_entries: Mapping[str, int]
) -> Steps[Any]:
    """Return the value of a JSON body; lists of numbers are arrays of at most three axes."""
    # ``hold`` is called with the bytes of each part of an array before it is made, and of each long
    # text. ``max_entries`` limits the lists in the outermost object, by field.
    reader = _Reader(body, hold, max_entries)
    value = yield from reader.value(0)
    if (yield from reader.next_byte()):
        raise ValueError(f"trailing characters at byte {reader.place}")
    return value


class _Reader:
    """A parser of one body; see ``parse_in_steps``."""

    def __init__(
        self, body: bytes, hold: Callable[[int], None], max_entries: Mapping[str, int]
    ) -> None:
        self._body = body
        self._hold = hold
        self._max_entries = max_entries
        self.place = 0
        self._values = 0
        self._pause = _STEP_VALUES

    def next_byte(self) -> Steps[bytes]:
        """Skip white space, and return the byte after it; empty at the end."""
        while True:
            end = _match_end(_SPACE, self._body, self.place, _TEXT_BYTES)
            is_end = end < self.place + _TEXT_BYTES
            self.place = end
            if is_end:
                return self._body[end : end + 1]
            yield

    def value(self, depth: int, field: str | None = None) -> Steps[Any]:
        """Return the next value, in this number of lists and objects, of the body's field."""
        self._count(1)
        if self._values >= self._pause:
            self._pause = self._values + _STEP_VALUES
            yield
        match (yield from self.next_byte()):
            case b'"':
                return (yield from self._string())
            case b"{":
                return (yield from self._object(depth + 1))
            case b"[":
                return (yield from self._list(depth + 1, field))
        end = _match_end(_SCALAR, self._body, self.place, _NUMBER_BYTES)
        scalar = self._parsed(self.place, max(end, self.place + 1))
        self.place = end
        return scalar

    def _object(self, depth: int) -> Steps[dict[str, Any]]:
        _check_depth(depth)
        members: dict[str, Any] = {}
        self.place += 1
        if (yield from self.next_byte()) == b"}":
            self.place += 1
            return members
        while True:
            self._expect(b'"', (yield from self.next_byte()))
            name = yield from self._string()
            self._expect(b":", (yield from self.next_byte()))
            self.place += 1
            field = name if depth == 1 else None
            members[name] = self._listed((yield from self.value(depth, field)))
            if self._is_end(b"}", (yield from self.next_byte())):
                return members

    def _list(self, depth: int, field: str | None) -> Steps[Any]:
        _check_depth(depth)
        limit = None if field is None else self._max_entries.get(field)
        entries = _Entries(self._count)
        self.place += 1
        if (yield from self.next_byte()) == b"]":
            self.place += 1
            return []
        while True:
            yield from self.next_byte()
            if end := self._numbers_end(depth, 0 if entries.is_array else _MIN_ARRAY_BYTES):
                yield  # parsing them takes most of a millisecond
                self._hold(8 * (self._body.count(b",", self.place, end) + 1))
                values = self._parsed(self.place, end, b"[", b"]")
                entries.add((yield from self._compact(values)))
                self.place = end
                yield
            else:
                entries.add([(yield from self.value(depth))])
            if limit is not None and entries.count > limit:
                raise too_many_entries(field, limit, "more", is_flat=entries.is_flat)
            if self._is_end(b"]", (yield from self.next_byte())):
                return entries.result()

    def _numbers_end(self, depth: int, min_bytes: int) -> int | None:
        """Return the end of as many whole entries of numbers, or lists of them, as fit a step."""
        last = _match_end(_NUMBERS, self._body, self.place, _NUMBER_BYTES)
        if last - self.place <= min_bytes:
            return None
        marks = np.frombuffer(self._body, np.uint8, last - self.place, self.place)
        depths = np.cumsum((marks == ord("[")).view(np.int8), dtype=np.int32)
        depths -= np.cumsum((marks == ord("]")).view(np.int8), dtype=np.int32)
        if len(after := np.flatnonzero(depths < 0)):
            end = int(after[0])
        elif len(commas := np.flatnonzero((marks == ord(",")) & (depths == 0))):
            end = int(commas[-1])
        else:
            return None
        if end:
            _check_depth(depth + int(depths[:end].max()))
        return self.place + end if end else None

    def _compact(self, values: list[Any]) -> Steps[Any]:
        """Return lists of numbers as arrays."""
        if (array := _as_array(values)) is not None:
            return array
        self._count(len(values))
        compacted = []
        for number, value in enumerate(values):
            compacted.append((yield from self._compact(value)) if type(value) is list else value)
            if number % _STEP_VALUES == _STEP_VALUES - 1:
                yield
        return compacted

    def _listed(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.size > _MAX_LISTED or not value.size:
            return value
        self._count(value.size)
        return value.tolist()

    def _string(self) -> Steps[str]:
        start, pieces = self.place + 1, list[str]()
        while True:
            end = _match_end(_CHARACTERS, self._body, start, _TEXT_BYTES)
            is_end = self._body[end : end + 1] == b'"'
            while not is_end and end > start and self._byte(end) & 0xC0 == 0x80:
                end -= 1  # the bytes of a character stay together
            if end == start and not is_end:
                end = start + 16  # the parser finds the fault
            pieces.append(self._parsed(start, end, b'"', b'"' if end <= len(self._body) else b""))
            self.place = start = end
            if is_end:
                self.place += 1
                if len(pieces) == 1:
                    return pieces[0]
                text = "".join(pieces)
                self._hold(text_bytes(text))
                return text
            yield

    def _byte(self, place: int) -> int:
        return self._body[place] if place < len(self._body) else 0

    def _parsed(self, start: int, end: int, before: bytes = b"", after: bytes = b"") -> Any:
        """Return the value of a part of the body between two quotes or brackets."""
        try:
            with collection_paused():
                return from_json(before + self._body[start:end] + after, allow_inf_nan=False)
        except ValueError as error:
            problem = str(error).partition(" at line ")[0]
            raise ValueError(f"{problem} at byte {start} or after") from None

    def _is_end(self, closing: bytes, found: bytes) -> bool:
        """Return whether a list or object ends, rather than goes on after a comma."""
        if found != closing:
            self._expect(b",", found)
        self.place += 1
        return found == closing

    def _expect(self, expected: bytes, found: bytes) -> None:
        if found != expected:
            raise ValueError(f"expected `{expected.decode()}` at byte {self.place}")

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise DocumentTooLongError(
                f"The body must have at most {MAX_VALUES} values beside numbers in lists, got "
                "more.",
                "Send several smaller requests.",
            )


class _Entries:
    """The entries of a list: an array as long as all are numbers or equal arrays."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._values: list[Any] = []
        self._numbers = bytearray()  # it grows without a second copy of the array
        self._dtype = np.dtype(np.int64)
        self._shape: tuple[int, ...] = ()
        self._length = 0

    @property
    def count(self) -> int:
        """The number of entries."""
        return self._length or len(self._values)

    @property
    def is_flat(self) -> bool:
        """Whether all entries are numbers."""
        return self.is_array and not self._shape

    @property
    def is_array(self) -> bool:
        """Whether there are entries, and all are numbers or equal arrays."""
        return self._length > 0

    def add(self, entries: list[Any] | NDArray[Any]) -> None:
        """Add the next entries."""
        is_first = not (self._length or self._values)
        if isinstance(entries, np.ndarray) and (
            is_first or (self.is_array and entries.shape[1:] == self._shape)
        ):
            self._add_numbers(entries)
            return
        if self._length:
            self._add_values(self._array())
            self._length = 0
        self._add_values(entries)

    def result(self) -> list[Any] | NDArray[Any]:
        """Return the list."""
        return self._values or self._array()

    def _add_numbers(self, entries: NDArray[Any]) -> None:
        self._shape = entries.shape[1:]
        if entries.dtype.kind == "f" and self._dtype.kind == "i":
            numbers = self._array().astype(entries.dtype)
            self._numbers, self._dtype = bytearray(numbers.tobytes()), entries.dtype
        self._numbers += entries.astype(self._dtype).tobytes()
        self._length += len(entries)

    def _array(self) -> NDArray[Any]:
        count = len(self._numbers) // self._dtype.itemsize
        numbers = np.frombuffer(self._numbers, self._dtype, count)
        return numbers.reshape(self._length, *self._shape)

    def _add_values(self, entries: list[Any] | NDArray[Any]) -> None:
        if isinstance(entries, np.ndarray):  # others are counted
            self._count(len(entries))
            # Numbers beside other values are Python's, but rows of numbers stay arrays.
            entries = entries.tolist() if entries.ndim == 1 else list(entries)
        self._values.extend(entries)


def text_bytes(text: str) -> int:
    """Return the bytes of the characters of a text, of which the widest sets the width of all."""
    return getsizeof(text) - getsizeof("")


def too_many_entries(
    field: str | None, limit: int, got: str, *, is_flat: bool
) -> DocumentTooLongError:
    """Return the error of a list of documents with too many entries, which may be numbers."""
    return DocumentTooLongError(
        f"{field} must have at most {limit} entries, got {got}.",
        "Put the ids of each document in their own list, because each entry is a document."
        if is_flat
        else "Send them in several requests.",
    )


def _match_end(pattern: re.Pattern[bytes], body: bytes, start: int, max_bytes: int) -> int:
    found = pattern.match(body, start, start + max_bytes)
    assert found is not None  # the patterns match nothing too
    return found.end()


def _as_array(values: list[Any]) -> NDArray[Any] | None:
    """Return numbers, or equal lists of them, as an array; None for other values."""
    try:
        array = np.array(values)
    except ValueError:  # their lengths differ
        return None
    # Integers beyond int64 would be unsigned, or objects.
    return array if array.dtype.kind in "if" and array.ndim <= _MAX_AXES else None


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise InputError(
            f"The body must have at most {_MAX_DEPTH} lists and objects in each other, got more.",
            "Send the fields that the documentation lists.",
        )
