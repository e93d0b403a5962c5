"""Comparison of an operator's result in ONNX Runtime with its definition."""

from pathlib import Path
from typing import Any

import numpy as np
from oracles import mechanisms

from .runner import INPUTS, LIBRARY, run

FORMULAS = {
    "AftFull": mechanisms.aft_full,
    "AftLocal": mechanisms.aft_local,
    "AftSimple": mechanisms.aft_simple,
    "AftConv": mechanisms.aft_conv,
    "EfficientAttention": mechanisms.efficient_attention,
    "Fastformer": mechanisms.fastformer,
    "NormalizedLinearAttention": mechanisms.linear_attention,
}
OPS = [prefix + name for name in FORMULAS for prefix in ("", "Causal")]
WITH_HEADS = [
    op
    for op in OPS
    if op.removeprefix("Causal")
    in ("AftConv", "EfficientAttention", "Fastformer", "NormalizedLinearAttention")
]

# Largest error relative to the largest value of the definition and of the input `value`.
BOUND = {np.dtype(np.float32): 3e-5, np.dtype(np.float16): 3e-3}


def definition(op: str, inputs: list[np.ndarray], **attributes: Any) -> np.ndarray:
    """Compute the operator by its formula in float64."""
    name = op.removeprefix("Causal")
    tensors = dict(zip(INPUTS[name], inputs, strict=True))
    return FORMULAS[name](tensors, causal=op.startswith("Causal"), **attributes)


def check(
    op: str,
    inputs: list[np.ndarray],
    bound: float | None = None,
    precision: str | None = None,
    library: Path | None = LIBRARY,
    bfloat16: bool = False,
    **attributes: Any,
) -> np.ndarray:
    """Check that the result is finite, and equals the definition on the rows that count."""
    chosen = {"precision": precision} if precision else {}
    actual = run(op, inputs, library=library, bfloat16=bfloat16, **chosen, **attributes)
    assert np.isfinite(actual).all()
    expected = definition(op, inputs, **attributes)
    scale = max(
        np.abs(expected).max(initial=0), np.abs(inputs[2].astype(np.float64)).max(initial=0), 1e-30
    )
    for b, length in enumerate(inputs[-1]):
        rows = slice(0, max(0, int(length)))
        error = np.abs(actual[b, rows] - expected[b, rows]).max(initial=0) / scale
        assert error <= (bound or BOUND[inputs[0].dtype]), (
            f"document {b} of length {length}: error {error:.1e}"
        )
    return actual


def rounding_effect(op: str, inputs: list[np.ndarray], **attributes: Any) -> float:
    """Return how far the definition moves if each number of the inputs moves by a rounding.

    The largest of eight random changes by at most 2^-23 of each number, in the measure of
    ``check``. No computation in float32 can be expected to be closer than this.
    """
    expected = definition(op, inputs, **attributes)
    scale = max(np.abs(expected).max(initial=0), np.abs(inputs[2]).max(initial=0), 1e-30)
    generator = np.random.default_rng(0)

    def moved(x: np.ndarray) -> np.ndarray:
        return x * (1 + generator.uniform(-1, 1, x.shape) * 2.0**-23)

    changes = [[*map(moved, inputs[:-1]), inputs[-1]] for _ in range(8)]
    results = [definition(op, change, **attributes) for change in changes]
    return max(float(np.abs(result - expected).max(initial=0)) for result in results) / scale


def attributes_of(op: str, heads: int = 1) -> dict[str, Any]:
    return {"num_heads": heads} if op in WITH_HEADS else {}
