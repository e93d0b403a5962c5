"""What each standard operator computes, as a formula: a function for each, by its ONNX name.

Each takes the reader, the node, and the axes of the dims of the node's output. None says that
this node is not one to look into; a leaf stands for it.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from aftexport.recognition.formula.axes import Dims
from aftexport.recognition.formula.terms import Product
from aftexport.recognition.read import arithmetic, layout, parts, products, sums, triangles, windows

if TYPE_CHECKING:
    from aftexport.recognition.read.reader import Reader

FORMULAS: "Mapping[str, Callable[[Reader, ir.Node, Dims], Product | None]]" = {
    **arithmetic.FORMULAS,
    **layout.FORMULAS,
    **sums.FORMULAS,
    **triangles.FORMULAS,
    **products.FORMULAS,
    **parts.FORMULAS,
    **windows.FORMULAS,
}
