"""Faults planted in the kernels; the tests must notice every one.

Each substitutes text that occurs exactly once in the file. None is harmless: a kernel that only
loses precision that the exact sums make up for is not faulty.
"""

from . import aft, fastformer, heads, windows
from .mutation import Mutation
from .slower import SLOWER

__all__ = ["MUTATIONS", "SLOWER", "Mutation"]

MUTATIONS = [*aft.MUTATIONS, *windows.MUTATIONS, *heads.MUTATIONS, *fastformer.MUTATIONS]
