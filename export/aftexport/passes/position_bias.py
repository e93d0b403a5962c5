"""How far AFT-full's position biases reach, and in what precision their exponentials are safe.

The kernels multiply exp(w - m), m the largest bias of a row, by exp(key - its maximum). For the
largest key that product is exp(-r) or more, r being the range of the row's biases: so far down may
all terms of a sum lie. float16 has its digits down to exp(-9.7), bfloat16 down to exp(-87).
A sum that comes out too small to be trusted, whatever the precision, is taken again in float32 as
it is defined, relative to its own largest logit: so outputs are right beyond these ranges as well,
but in 16 bits there would be nothing left to gain.

In 8-bit integers exp(w - m) has the same step for every size; down to exp(-1) that is 1 % of it or
less. The keys' terms have a step for each block of keys, of which a causal row may see the smallest
only: int8 is not for causal rows.
"""

from collections.abc import Iterator

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from aftexport.bundle.manifest import PositionBias
from aftexport.operators.domain import DOMAIN

LARGEST_RANGE = {"int8": 1.0, "fp16": 8.0, "bf16": 75.0}
"""Of a row's biases, where exponentials in that precision lose nothing but its rounding."""
_ALLOWED: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "fp16": ("fp16", "bf16"),
    "bf16": ("bf16",),
    "int8": ("int8", "bf16"),
}
"""What exponentials may be in, by the export's precision, the cheapest first; else fp32."""


def row_range(bias: NDArray[np.generic], *, causal: bool) -> float | None:
    """The largest ``max - min`` of a row of ``bias [Tmax, Tmax]``; None where one is not finite.

    Args:
        bias: row for the query, column for the key.
        causal: a row counts up to the diagonal.
    """
    with np.errstate(invalid="ignore"):  # of infinities
        ranges = [
            np.ptp((row[: t + 1] if causal else row).astype(np.float64))
            for t, row in enumerate(bias)
        ]
    largest = float(np.max(ranges))
    return largest if np.isfinite(largest) else None


def safe_precision(precision: str, row_range: float | None, *, causal: bool) -> str:
    """The cheapest precision that the exponentials of an export may be in.

    Args:
        precision: of the export.
        row_range: of the bias; None for one that is not known, which is safe in fp32 only.
        causal: whether rows count up to the diagonal.
    """
    for candidate in _ALLOWED[precision]:
        if causal and candidate == "int8":
            continue
        if row_range is not None and row_range <= LARGEST_RANGE[candidate]:
            return candidate
    return "fp32"


def choose_precisions(model: onnx.ModelProto, precision: str) -> None:
    """Sets ``precision`` of every AFT-full node to the cheapest that is safe for its bias.

    Args:
        model: changed in place; biases that its graph computes are not known.
        precision: of the export.
    """
    for node, reach in _measured(model):
        safe = safe_precision(precision, reach, causal=_is_causal(node))
        _precision(node).s = safe.encode()


def position_biases(model: onnx.ModelProto) -> tuple[PositionBias, ...]:
    """What was measured and chosen for every AFT-full node."""
    return tuple(
        PositionBias.model_validate(
            {"node": node.name, "row_range": reach, "precision": _precision(node).s.decode()}
        )
        for node, reach in _measured(model)
    )


def _measured(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, float | None]]:
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type in ("AftFull", "CausalAftFull"):
            bias = constants.get(node.input[3])
            if bias is None:
                yield node, None
            else:
                yield node, row_range(numpy_helper.to_array(bias), causal=_is_causal(node))


def _is_causal(node: onnx.NodeProto) -> bool:
    return node.op_type == "CausalAftFull"


def _precision(node: onnx.NodeProto) -> onnx.AttributeProto:
    attribute: onnx.AttributeProto = next(a for a in node.attribute if a.name == "precision")
    return attribute
