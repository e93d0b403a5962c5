"""Parity: is the served model still the trained one? Tolerances and the comparison.

Nothing here imports torch: the golden cases carry PyTorch's outputs, so that any machine can judge
any engine.
"""

from aftexport.parity.comparison import Comparison, compare, worst
from aftexport.parity.tolerance import TOLERANCES, Tolerance

__all__ = ["TOLERANCES", "Comparison", "Tolerance", "compare", "worst"]
