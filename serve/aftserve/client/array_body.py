"""The body of a request with an array, in the format of ``numpy.save``.

The client needs no NumPy: an array brings its own methods.
"""

from collections.abc import Iterator
from typing import Any, Protocol

_PART_BYTES = 1 << 20
_ALIGNMENT = 64


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
    """The bytes of one document of features, which can be sent several times.

    Args:
        features: numbers ``[tokens, features]``, sent as float32.

    Raises:
        ValueError: if ``features`` is not such an array.
    """

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
