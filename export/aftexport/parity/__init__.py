"""Parity of the exported model with the trained one: tolerances and comparisons.

These modules do not import torch: the golden cases hold PyTorch's outputs, so that any machine can
check any engine.
"""

from aftexport.parity.comparison import TOLERANCES, Comparison, Tolerance, compare, worst

__all__ = ["TOLERANCES", "Comparison", "Tolerance", "compare", "worst"]
