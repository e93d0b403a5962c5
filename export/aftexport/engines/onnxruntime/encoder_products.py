"""Products of 16 bits in the encoder's operators, for a provider without kernels for them.

In a file, the bodies of these operators compute in float32. The CUDA execution provider then
multiplies in float32 without tensor cores, which takes several times as long as the products of
float16 or bfloat16 that the precision of the model allows.
"""

import onnx_ir as ir

from aftexport.operators.domain import DOMAIN
from aftexport.operators.encoder import ARITHMETIC_OPERATORS
from aftexport.operators.encoder.arithmetic import Arithmetic

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_WEIGHT = 1
"""The position of an input that every one of these operators has, a parameter of the model."""


def narrow_products(model: ir.Model) -> bool:
    """Let every node whose precision allows it call a body with products of 16 bits.

    Args:
        model: a model whose nodes have bodies; it is changed in place.

    Returns:
        Whether there was such a node.
    """
    opset = model.opset_imports.get("", 0)
    changed = False
    for node in model.graph:
        operator = ARITHMETIC_OPERATORS.get(node.op_type) if node.domain == DOMAIN else None
        arithmetic = _arithmetic(node) if operator is not None else None
        if operator is None or arithmetic is None:
            continue
        name = f"{operator.op_type}_{arithmetic.value}"
        identifier = (DOMAIN, name, "")
        if identifier not in model.functions:
            body = ir.serde.deserialize_function(
                operator.function({}, opset, arithmetic=arithmetic)
            )
            body.name = name
            model.functions[identifier] = body
        node.op_type = name
        changed = True
    return changed


def _arithmetic(node: ir.Node) -> Arithmetic | None:
    """Return the arithmetic of a node's body; None for that of the file."""
    weight = node.inputs[_WEIGHT]
    if weight is None or weight.dtype is None:
        return None
    if weight.dtype in _NARROW:
        return Arithmetic.TENSORS
    # bfloat16 keeps the bound of int8 too, without a pass that quantizes the activations.
    if node.attributes.get_string("precision", "fp32") in ("bf16", "int8"):
        return Arithmetic.BFLOAT16
    return None
