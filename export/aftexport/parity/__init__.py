"""Is what is served still what was trained? The bounds, the comparison, the cases.

What is imported here needs no torch: the golden cases carry PyTorch's outputs, so that any
machine can judge any engine.
"""

from aftexport.parity.case import Array, Case, pack_cases, unpack_cases
from aftexport.parity.comparison import Comparison, compare, worst
from aftexport.parity.tolerance import TOLERANCES, Tolerance

__all__ = [
    "TOLERANCES",
    "Array",
    "Case",
    "Comparison",
    "Tolerance",
    "compare",
    "pack_cases",
    "unpack_cases",
    "worst",
]
