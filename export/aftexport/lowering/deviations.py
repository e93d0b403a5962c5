"""Translations of standard deviations, accurate also if squares overflow or underflow float32.

torch computes them in float64. torch.onnx squares in the type of the numbers: a float32 square is
infinite for numbers above 1e19 and 0 for numbers below 1e-22.
"""

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op

_aten = torch.ops.aten


def deviations() -> dict[Any, Callable[..., Any]]:
    """Return the translations of the standard deviations of torch, for torch.onnx."""
    return {
        _aten.std.correction: _std,
        _aten.std.dim: _std_of_dims,
        _aten.std.default: _std_of_all,
        _aten.std_mean.correction: _std_mean,
    }


def _std(self, dim=None, correction=None, keepdim=False):  # type: ignore[no-untyped-def]
    return _deviation(self, dim, 1 if correction is None else correction, keepdim=keepdim)


def _std_of_dims(self, dim=None, unbiased=True, keepdim=False):  # type: ignore[no-untyped-def]
    return _deviation(self, dim, int(unbiased), keepdim=keepdim)


def _std_of_all(self, unbiased=True):  # type: ignore[no-untyped-def]
    return _deviation(self, None, int(unbiased), keepdim=False)


def _std_mean(self, dim=None, correction=None, keepdim=False):  # type: ignore[no-untyped-def]
    mean = op.ReduceMean(self, _axes(dim), keepdims=int(keepdim))
    unbiased = 1 if correction is None else correction
    return _deviation(self, dim, unbiased, keepdim=keepdim), mean


def _deviation(x: Any, dim: Sequence[int] | int | None, correction: float, *, keepdim: bool) -> Any:
    axes, original = _axes(dim), x
    if x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        x = op.Cast(x, to=ir.DataType.FLOAT)  # 16 bits cannot hold every number of tokens
    zero, one = op.CastLike(0.0, x), op.CastLike(1.0, x)
    apart = _less_mean(_less_mean(x, axes), axes)  # the second removes the first one's rounding
    largest = op.ReduceMax(op.Abs(apart), axes, keepdims=1)
    scale = op.Where(op.Greater(largest, zero), largest, one)
    ratio = op.Div(apart, scale)
    squares = op.ReduceSum(op.Mul(ratio, ratio), axes, keepdims=1)
    left = op.Max(op.Sub(_count(x, axes), op.CastLike(float(correction), x)), zero)
    result = op.CastLike(op.Mul(scale, op.Sqrt(op.Div(squares, left))), original)
    if keepdim:
        return result
    return op.Squeeze(result, axes) if axes is not None else op.Squeeze(result)


def _less_mean(x: Any, axes: Any) -> Any:
    # Division before the sum keeps numbers near the largest float from overflowing.
    return op.Sub(x, op.ReduceSum(op.Div(x, _count(x, axes)), axes, keepdims=1))


def _count(x: Any, axes: Any) -> Any:
    shape = op.Shape(x)
    sizes = shape if axes is None else op.Gather(shape, axes)
    return op.CastLike(op.ReduceProd(sizes, keepdims=0), x)


def _axes(dim: Sequence[int] | int | None) -> Any:
    axes = [dim] if isinstance(dim, int) else [*(dim or ())]
    return op.Constant(value_ints=axes) if axes else None
