"""Types that every layer of the server shares."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
"""Token ids of one document, ``[T]``."""

Document = str | Sequence[int] | Tokens
"""A text, or token ids that are not checked yet."""
