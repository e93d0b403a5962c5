"""Guards that replace NaN after a mechanism.

A row without keys is NaN in PyTorch, and ``nan_to_num`` or ``where(isnan(y), x, y)`` replaces it.
The operators return finite numbers for such a row, which a guard does not replace.
"""

import onnx_ir as ir

from aftexport.recognition.formula.terms import ONE
from aftexport.recognition.patterns.pattern import Operand, Rewrite

_DOCUMENT_INPUTS = {"input_ids", "input_features", "lengths"}


def reads_nan(value: ir.Value) -> bool:
    """Return whether a guard reads a value, or a value that is computed from it."""
    pending, seen = [value], {value}
    while pending:
        for node in pending.pop().consumers():
            if node.op_type == "IsNaN" or (
                node.op_type == "Equal" and node.inputs[0] is node.inputs[1]
            ):
                return True
            after = [output for output in node.outputs if output not in seen]
            seen.update(after)
            pending += after
    return False


def may_lack_keys(model: ir.Model, rewrite: Rewrite) -> bool:
    """Return whether a row may have no key that counts.

    The model of a bundle has a key for every row, since each document has at least one token.
    """
    if {value.name for value in model.graph.inputs} <= _DOCUMENT_INPUTS:
        return False
    operands = [operand for operand in rewrite.operands if isinstance(operand, Operand)]
    is_masked = any(operand.weights != ONE or operand.floored for operand in operands)
    return is_masked or rewrite.extra_head
