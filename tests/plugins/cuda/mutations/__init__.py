"""Faults planted in the kernels; the tests must notice every one.

Each substitutes text that occurs exactly once in the file. None is harmless: a kernel that only
loses precision that the exact sums make up for is not faulty.
"""

from . import aft, fastformer, heads, windows
from .mutation import Mutation, faults

__all__ = ["MUTATIONS", "SLOWER", "Mutation"]

MUTATIONS = [*aft.MUTATIONS, *windows.MUTATIONS, *heads.MUTATIONS, *fastformer.MUTATIONS]

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
"""Faults that only cost time: bank conflicts, and lanes that read from different rows."""
