"""The functions that read nodes of standard operators as formulas, by ONNX name.

Each takes the reader, the node, and the axes of the dims of its output. It returns None for a node
that is to stay a leaf.
"""

from collections.abc import Mapping

from aftexport.recognition.read import arithmetic, layout, parts, products, sums, triangles, windows
from aftexport.recognition.read.reader import Formula

FORMULAS: Mapping[str, Formula] = {
    **arithmetic.FORMULAS,
    **layout.FORMULAS,
    **sums.FORMULAS,
    **triangles.FORMULAS,
    **products.FORMULAS,
    **parts.FORMULAS,
    **windows.FORMULAS,
}
_OF_FEATURES = (
    "Conv", "Exp", "Gather", "GatherND", "LogSoftmax", "ReduceLogSumExp", "ReduceMax", "Softmax",
)  # fmt: skip
PRODUCT_FORMULAS: Mapping[str, Formula] = {
    name: formula for name, formula in FORMULAS.items() if name not in _OF_FEATURES
} | dict.fromkeys(("Pow", "Sqrt"), arithmetic.power_of_size)
"""The formulas with which features are leaves: only products and sums of them are read."""
PRODUCT_FUNCTIONS = ("Clip", "Max")
"""The elementwise operators that may limit a denominator."""
