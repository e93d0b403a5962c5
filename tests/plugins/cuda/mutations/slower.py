"""Faults that only cost time: bank conflicts, and lanes that read from different rows."""

from .mutation import faults

_LANES_ALONG_ROWS = """first_row() { return threadIdx.x / kPerRow; }
  static __device__ __forceinline__ int column() { return threadIdx.x % kPerRow * kUnit; }
"""
_LANES_ALONG_COLUMNS = """first_row() { return threadIdx.x % kRowsApart; }
  static __device__ __forceinline__ int column() { return threadIdx.x / kRowsApart * kUnit; }
"""

SLOWER = [
    *faults(
        "fastformer",
        "mechanisms/fastformer_pool.cuh",
        ("slab[kPoolTokens][kSlab + 4]", "slab[kPoolTokens][kSlab]"),
    ),
    *faults(
        "linear_attention",
        "device/tile_rows.cuh",
        (_LANES_ALONG_ROWS, _LANES_ALONG_COLUMNS),
    ),
]
