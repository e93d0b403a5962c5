"""The combination of values that are pooled from parts of a document."""

import numpy as np

from aftexport.bundle.chunked_plan import Pooling
from aftexport.chunked.spill import Array

_COMBINE = {"sum": np.add, "max": np.maximum}


def combine_pooled(pooling: Pooling, before: Array, new: Array) -> Array:
    """Return the value of the tokens of ``before`` and the later ones of ``new``."""
    if pooling == "first":
        return before
    combined: Array = _COMBINE[pooling](before, new)
    return combined
