"""The body of a request with an array, in the format of ``numpy.save``."""

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike

_PART_BYTES = 1 << 20


class ArrayBody:
    """The bytes of one document of features, which can be sent several times.

    Args:
        features: numbers ``[tokens, features]``, sent as float32.

    Raises:
        ValueError: if ``features`` is not such an array.
    """

    content_type = "application/x-npy"

    def __init__(self, features: ArrayLike) -> None:
        self._array = np.asarray(features)
        if self._array.ndim != 2 or self._array.dtype.kind not in "fiu":
            raise ValueError(
                "features must be numbers [tokens, features], got "
                f"{self._array.dtype} {list(self._array.shape)}"
            )
        header = BytesIO()
        description: dict[str, Any] = {
            "descr": "<f4",
            "fortran_order": False,
            "shape": self._array.shape,
        }
        npy.write_array_header_1_0(header, description)
        self._header = header.getvalue()

    def __len__(self) -> int:
        """Return the number of bytes."""
        return len(self._header) + 4 * self._array.size

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes in parts, so that a large array is never copied as a whole."""
        yield self._header
        rows = max(1, _PART_BYTES // (4 * max(1, self._array.shape[1])))
        for start in range(0, len(self._array), rows):
            yield self._array[start : start + rows].astype("<f4").tobytes()
