"""The safe precisions of AFT-full's exponentials; see ``operators.position_bias_range``."""

from collections.abc import Iterator

import onnx
from onnx import numpy_helper

from aftexport.bundle.manifest import PositionBias
from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.operators.position_bias_range import MAX_RANGE, row_range

_OPERATORS = ("AftFull", "CausalAftFull")
_ALLOWED: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "fp16": ("fp16", "bf16"),
    "bf16": ("bf16",),
    "int8": ("int8", "bf16"),
}
"""Export precision to the precisions allowed for exponentials, the cheapest first; else fp32."""


def safe_precision(precision: str, bias_range: float | None, *, causal: bool) -> str:
    """Return the cheapest safe precision for the exponentials of an export.

    Args:
        precision: the precision of the export.
        bias_range: the range of the bias; None if unknown, which is safe only in fp32.
        causal: whether only the part of a row up to the diagonal counts.
    """
    for candidate in _ALLOWED[precision]:
        if causal and candidate == "int8":
            continue
        if bias_range is not None and bias_range <= MAX_RANGE[candidate]:
            return candidate
    return "fp32"


def choose_precisions(model: onnx.ModelProto, precision: str) -> None:
    """Set ``precision`` of every AFT-full node to the cheapest that is safe for its bias.

    Args:
        model: the graph, which is changed in place; the ranges of computed biases are unknown.
        precision: the precision of the export.
    """
    for node, bias_range in _bias_ranges(model):
        safe = safe_precision(precision, bias_range, causal=_is_causal(node))
        _precision(node).s = safe.encode()


def position_biases(model: onnx.ModelProto) -> tuple[PositionBias, ...]:
    """Return the range of the bias and the chosen precision of every AFT-full node."""
    return tuple(
        PositionBias.model_validate(
            {"node": node.name, "row_range": bias_range, "precision": _precision(node).s.decode()}
        )
        for node, bias_range in _bias_ranges(model)
    )


def _bias_ranges(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, float | None]]:
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.domain == DOMAIN and operator_name(node.op_type) in _OPERATORS:
            bias = constants.get(node.input[3])
            if bias is None:
                yield node, None
            else:
                yield node, row_range(numpy_helper.to_array(bias), causal=_is_causal(node))


def _is_causal(node: onnx.NodeProto) -> bool:
    return operator_name(node.op_type) == "CausalAftFull"


def _precision(node: onnx.NodeProto) -> onnx.AttributeProto:
    attribute: onnx.AttributeProto = next(a for a in node.attribute if a.name == "precision")
    return attribute
