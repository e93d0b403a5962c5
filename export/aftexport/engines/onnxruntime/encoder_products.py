"""Products of 16 bits in the encoder's operators, for a provider without kernels for them.

In a file, the bodies of these operators compute in float32. The CUDA execution provider then
multiplies in float32 without tensor cores, which takes several times as long as the products of
float16 or bfloat16 that the precision of the model allows.
"""

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import TensorProto

from aftexport.operators.domain import DOMAIN, opset_of
from aftexport.operators.encoder import ARITHMETIC_OPERATORS
from aftexport.operators.encoder.arithmetic import Arithmetic
from aftexport.operators.encoder.layer_norm_feed_forward import LAYER_NORM_FEED_FORWARD
from aftexport.operators.schema import OnnxOperator

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_GELU_OPSET = 20
"""The first opset with the operator Gelu."""
_WEIGHT = 1
"""The position of an input that every one of these operators has, a parameter of the model."""


def narrow_products(model: onnx.ModelProto) -> bool:
    """Let every node whose precision allows it call a body with products of 16 bits.

    Args:
        model: a model whose nodes have bodies; it is changed in place.

    Returns:
        Whether there was such a node.
    """
    types = _element_types(model.graph)
    bodies: dict[str, onnx.FunctionProto] = {}
    replaced: set[str] = set()
    for node in model.graph.node:
        operator = ARITHMETIC_OPERATORS.get(node.op_type) if node.domain == DOMAIN else None
        arithmetic = _arithmetic(node, types) if operator is not None else None
        if operator is None or arithmetic is None:
            continue
        name = f"{operator.op_type}_{arithmetic.value}"
        if name not in bodies:
            bodies[name] = _body(operator, arithmetic, opset_of(model))
            bodies[name].name = name
        replaced.add(operator.op_type)
        node.op_type = name
    model.functions.extend(bodies.values())
    _remove_unused(model, replaced)
    return bool(bodies)


def _element_types(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the types of the values that a file declares: weights, and inputs in their place."""
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _arithmetic(node: onnx.NodeProto, types: Mapping[str, int]) -> Arithmetic | None:
    """Return the arithmetic of a node's body; None for that of the file."""
    element = types.get(node.input[_WEIGHT])
    if element in _NARROW:
        return Arithmetic.TENSORS
    precision = next((a.s for a in node.attribute if a.name == "precision"), b"fp32")
    # bfloat16 keeps the bound of int8 too, without a pass that quantizes the activations.
    if element == TensorProto.FLOAT and precision in (b"bf16", b"int8"):
        return Arithmetic.BFLOAT16
    return None


def _body(operator: OnnxOperator, arithmetic: Arithmetic, opset: int) -> onnx.FunctionProto:
    form: dict[str, Any] = {"arithmetic": arithmetic}
    if operator is LAYER_NORM_FEED_FORWARD:
        form["has_gelu"] = opset >= _GELU_OPSET
    return operator.function({}, opset, **form)


def _remove_unused(model: onnx.ModelProto, names: set[str]) -> None:
    """Remove the functions with these names that no node calls any more."""
    unused = names - {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    for function in [f for f in model.functions if f.domain == DOMAIN and f.name in unused]:
        model.functions.remove(function)
