"""The range of AFT-full's position biases, and the precisions of exponentials that suit it.

The kernels multiply exp(w - m), with m the largest bias of a row, by exp(key - its maximum). For
the largest key that product is at least exp(-r), with r the range of the row's biases, so all terms
of a sum may be as small as exp(-r). float16 keeps its digits down to exp(-9.7), bfloat16 down to
exp(-87). In every precision, a sum too small to be accurate is computed again in float32 by its
definition, relative to its own largest logit. Outputs are therefore right beyond these ranges too,
but 16 bits would not be faster there.

In 8-bit integers exp(w - m) has the same step for every size; down to exp(-1) the step is at most
1 % of it. The keys' terms have one step for each block of keys, and a causal row may see only the
smallest of a block: int8 does not suit causal rows.
"""

import numpy as np
from numpy.typing import NDArray

MAX_RANGE = {"int8": 1.0, "fp16": 8.0, "bf16": 75.0}
"""Precision to the maximum range of a row's biases for which exponentials lose only rounding."""


def row_range(bias: NDArray[np.generic], *, causal: bool) -> float | None:
    """Return the largest ``max - min`` of a row of ``bias [Tmax, Tmax]``; None if not finite.

    Args:
        bias: the biases, with a row for each query and a column for each key.
        causal: whether only the part of a row up to the diagonal counts.
    """
    with np.errstate(invalid="ignore"):  # differences of infinities
        ranges = [
            np.ptp((row[: t + 1] if causal else row).astype(np.float64))
            for t, row in enumerate(bias)
        ]
    largest = float(np.max(ranges))
    return largest if np.isfinite(largest) else None
