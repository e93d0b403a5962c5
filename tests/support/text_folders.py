"""Files that ``aftserve batch`` reads: folders of texts, and columns of a Parquet file."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa


def write_texts(texts: Sequence[str | bytes], folder: Path) -> Path:
    """Write each text to a file in one of seven subfolders; return the folder."""
    for number, text in enumerate(texts):
        path = folder / f"{number % 7}" / f"{number:05}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def unchecked_strings(*values: bytes) -> pa.Array:
    """Return an array of strings that may not be UTF-8, as a Parquet file may contain."""
    array = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())
