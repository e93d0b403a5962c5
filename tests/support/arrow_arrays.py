"""Arrow arrays that a Parquet file may contain."""

import pyarrow as pa


def unchecked_strings(*values: bytes) -> pa.Array:
    """Return an array of strings that may not be UTF-8, as a Parquet file may contain."""
    array = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())
