"""What each standard operator computes, as a formula: a function for each, by its ONNX name.

Each takes the reader, the node, and the axes of the dims of the node's output. None says that
this node is not one to look into; a leaf stands for it.
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
