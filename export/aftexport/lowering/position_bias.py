"""The precisions of mechanisms' products: AFT-full's by the range of its position biases.

The kernels multiply exp(w - m), with m the largest bias of a row, by exp(key - its maximum). For
the largest key that product is at least exp(-r), with r the range of the row's biases, so all terms
of a sum may be as small as exp(-r). float16 keeps its digits down to exp(-9.7), bfloat16 down to
exp(-87). In every precision, a sum too small to be accurate is computed again in float32 by its
definition, relative to its own largest logit. Outputs are therefore right beyond these ranges too,
but 16 bits would not be faster there.

In 8-bit integers exp(w - m) has the same step for every size; down to exp(-1) the step is at most
1 % of it. The keys' terms have one step for each block of keys, and a causal row may see only the
smallest of a block: int8 does not suit causal rows.

Softmax attention's weights have every size in a row: one step for all would lose thousands of small
ones, which together may be most of the sum. So int8 is bf16 there.
"""

from collections.abc import Iterator

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from aftexport.bundle.manifest import PositionBias
from aftexport.operators.domain import DOMAIN, operator_name

_OPERATORS = ("AftFull", "CausalAftFull")
MAX_RANGE = {"int8": 1.0, "fp16": 8.0, "bf16": 75.0}
"""Precision to the maximum range of a row's biases for which exponentials lose only rounding."""
_ALLOWED: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "fp16": ("fp16", "bf16"),
    "bf16": ("bf16",),
    "int8": ("int8", "bf16"),
}
"""Export precision to the precisions allowed for exponentials, the cheapest first; else fp32."""


def row_range(bias: NDArray[np.generic], *, causal: bool) -> float | None:
    """Return the largest ``max - min`` of a row of ``bias [Tmax, Tmax]``; None if not finite.

    If ``causal``, only the part of a row up to the diagonal counts.
    """
    with np.errstate(invalid="ignore"):  # differences of infinities
        ranges = [
            np.ptp((row[: t + 1] if causal else row).astype(np.float64))
            for t, row in enumerate(bias)
        ]
    largest = float(np.max(ranges))
    return largest if np.isfinite(largest) else None


def safe_precision(precision: str, row_range: float | None, *, causal: bool) -> str:
    """Return the cheapest safe precision for the exponentials of an export.

    An unknown range, None, is safe only in fp32.
    """
    for candidate in _ALLOWED[precision]:
        if causal and candidate == "int8":
            continue
        if row_range is not None and row_range <= MAX_RANGE[candidate]:
            return candidate
    return "fp32"


def choose_precisions(model: onnx.ModelProto, precision: str) -> None:
    """Set ``precision`` of every mechanism's products to the cheapest that is safe."""
    for node in model.graph.node:
        if node.domain == DOMAIN and operator_name(node.op_type) == "SoftmaxAttention":
            _precision(node).s = b"bf16" if precision in ("bf16", "int8") else b"fp32"
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
    if not any(a.name == "precision" for a in node.attribute):
        node.attribute.append(onnx.helper.make_attribute("precision", "fp32"))
    attribute: onnx.AttributeProto = next(a for a in node.attribute if a.name == "precision")
    return attribute
