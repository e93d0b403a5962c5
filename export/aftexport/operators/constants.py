"""Numbers that every form of an operator shares."""

import math

MASKED = -math.inf
"""The logit of a masked key. If every key is masked, the mean is 0."""

MAX_BLOCK = 1024
"""The maximum number of terms that a runtime may add one by one. The error grows with their number:
a million equal tokens would be off by 1e-2. Longer sums are computed in two levels."""
