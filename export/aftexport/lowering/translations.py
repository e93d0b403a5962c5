"""Translations for torch.onnx: mechanisms, pooling to a size, deviations, functions of numbers.

torch.onnx itself cannot translate these operators, or only for the example's length, or not
accurately.
"""

import inspect
import math
import operator as python
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript import values

from aftexport.lowering.scan_translations import (
    constant,
    logcumsumexp,
    scaled_dot_product_attention,
)
from aftexport.lowering.size_floats import size_translations
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.schema import Attribute
from aftexport.operators.torch_ops import OPERATORS, SINGLE_OPERATORS, Operator

_SMALL = 0.5
"""The bound up to which 1 - erf(x) keeps all its digits."""
_ERFC = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806,
         0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277)  # fmt: skip
"""Coefficients of log(erfcx(x) / t) in t = 1 / (1 + x / 2), lowest power first. The error is at
most 1.2e-7 (Press et al., Numerical Recipes, 6.2)."""
_ERFINV_CENTER = (1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.000218580870,
                  -4.39150654e-06, -3.5233877e-06, 3.43273939e-07, 2.81022636e-08)  # fmt: skip
_ERFINV_TAIL = (2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773,
                -0.00367342844, 0.00134934322, 0.000100950558, -0.000200214257)  # fmt: skip
"""Coefficients of erfinv(x) / x in w - 2.5 and sqrt(w) - 3, w = -log(1 - x^2), lowest power first
(Giles, Approximating the erfinv function, in GPU Computing Gems)."""


# torch.onnx writes many functions of one number by the textbook formula, such as log(sigmoid(x)) or
# 1 - erf(x). These cancel, overflow or round to 0 where the function is an ordinary number.
def _scalar_functions() -> dict[Any, Callable[..., Any]]:
    """Return the translations of scalar functions of torch, for torch.onnx."""
    return {
        _aten.log_sigmoid.default: _log_sigmoid,
        _aten.log1p.default: _log1p,
        _aten.expm1.default: _expm1,
        _aten.special_expm1.default: _expm1,
        _aten.special_log1p.default: _log1p,
        _aten.erfc.default: _erfc,
        _aten.special_erfc.default: _erfc,
        _aten.special_erfcx.default: _erfcx,
        _aten.erfinv.default: _erfinv,
        _aten.special_erfinv.default: _erfinv,
        _aten.special_log_ndtr.default: _log_ndtr,
        _aten.logaddexp.default: _logaddexp,
        _aten.logaddexp2.default: _logaddexp2,
        _aten.special_xlog1py.default: _xlog1py,
        _aten.atan2.default: _atan2,
        _aten.hypot.default: _hypot,
        _aten.remainder.Scalar: _remainder,
        _aten.remainder.Tensor: _remainder,
    }


def log_add_exp(a: Any, b: Any) -> Any:
    """Return log(exp(a) + exp(b)), also for infinite arguments."""
    # The difference of equal infinities is NaN.
    apart = op.Where(op.Equal(a, b), op.CastLike(0.0, a), op.Abs(op.Sub(a, b)))
    return op.Add(op.Max(a, b), op.Softplus(op.Neg(apart)))


def _log_sigmoid(self):  # type: ignore[no-untyped-def]
    return op.Neg(op.Softplus(op.Neg(self)))


def _log1p(self: Any) -> Any:
    one = op.CastLike(1.0, self)
    sum_ = op.Add(one, self)
    rest = op.Sub(sum_, one)
    # The quotient compensates the rounding of the sum.
    corrected = op.Mul(op.Log(sum_), op.Div(self, rest))
    exact = op.Or(op.Equal(sum_, one), op.Equal(sum_, op.CastLike(math.inf, self)))
    return op.Where(exact, self, corrected)


def _expm1(self):  # type: ignore[no-untyped-def]
    half = op.Tanh(op.Mul(self, op.CastLike(0.5, self)))
    return op.Mul(half, op.Add(op.Exp(self), op.CastLike(1.0, self)))


def _xlog1py(self, other):  # type: ignore[no-untyped-def]
    zero = op.CastLike(0.0, other)
    product = op.Mul(self, _log1p(other))
    return op.Where(op.And(op.Equal(self, zero), op.Not(op.IsNaN(other))), zero, product)


def _erfc(self: Any) -> Any:
    small = op.Sub(op.CastLike(1.0, self), op.Erf(self))
    scaled = _scaled_tail(self)
    large = op.Mul(op.Exp(op.Neg(op.Mul(self, self))), scaled)
    return op.Where(op.Less(self, op.CastLike(_SMALL, self)), small, large)


def _erfcx(self):  # type: ignore[no-untyped-def]
    tail, zero = _scaled_tail(self), op.CastLike(0.0, self)
    growing = op.Mul(op.CastLike(2.0, self), op.Exp(op.Mul(self, self)))
    return op.Where(op.Less(self, zero), op.Sub(growing, tail), tail)


def _scaled_tail(x: Any) -> Any:
    """Return exp(x^2) erfc(|x|)."""
    one = op.CastLike(1.0, x)
    t = op.Div(one, op.Add(one, op.Mul(op.CastLike(0.5, x), op.Abs(x))))
    return op.Mul(t, op.Exp(_polynomial(t, _ERFC)))


def _erfinv(self):  # type: ignore[no-untyped-def]
    one = op.CastLike(1.0, self)
    w = op.Neg(op.Log(op.Mul(op.Sub(one, self), op.Add(one, self))))
    center = _polynomial(op.Sub(w, op.CastLike(2.5, self)), _ERFINV_CENTER)
    tail = _polynomial(op.Sub(op.Sqrt(w), op.CastLike(3.0, self)), _ERFINV_TAIL)
    ratio = op.Where(op.Less(w, op.CastLike(5.0, self)), center, tail)
    infinite = op.Mul(self, op.CastLike(math.inf, self))
    return op.Where(op.Equal(op.Abs(self), one), infinite, op.Mul(ratio, self))


def _log_ndtr(self):  # type: ignore[no-untyped-def]
    scaled = op.Mul(self, op.CastLike(-math.sqrt(0.5), self))
    half = op.CastLike(0.5, self)
    square = op.Mul(scaled, scaled)
    left = op.Sub(op.Log(op.Mul(half, _scaled_tail(scaled))), square)
    right = _log1p(op.Neg(op.Mul(half, _erfc(op.Neg(scaled)))))
    return op.Where(op.Less(self, op.CastLike(-1.0, self)), left, right)


def _logaddexp(self, other):  # type: ignore[no-untyped-def]
    return log_add_exp(self, other)


def _logaddexp2(self, other):  # type: ignore[no-untyped-def]
    log2 = op.CastLike(math.log(2), self)
    apart = op.Where(op.Equal(self, other), op.CastLike(0.0, self), op.Abs(op.Sub(self, other)))
    more = op.Div(op.Softplus(op.Neg(op.Mul(apart, log2))), log2)
    return op.Add(op.Max(self, other), more)


def _atan2(self, other):  # type: ignore[no-untyped-def]
    zero, pi = op.CastLike(0.0, self), op.CastLike(math.pi, self)
    infinity = op.CastLike(math.inf, self)
    at_origin = op.And(op.Equal(self, zero), op.Equal(other, zero))
    both = op.And(op.Equal(op.Abs(self), infinity), op.Equal(op.Abs(other), infinity))
    ratio = op.Where(both, op.Mul(op.Sign(self), op.Sign(other)), op.Div(self, other))
    ratio = op.Where(at_origin, self, ratio)
    half_turn = op.Where(_is_negative(self), op.Neg(pi), pi)
    return op.Add(op.Atan(ratio), op.Where(_is_negative(other), half_turn, zero))


def _hypot(self, other):  # type: ignore[no-untyped-def]
    # Squares can overflow or underflow even if the root is an ordinary number.
    one, other = op.CastLike(1.0, self), op.CastLike(other, self)
    first, second = op.Abs(self), op.Abs(other)
    large, small = op.Max(first, second), op.Min(first, second)
    infinity = op.CastLike(math.inf, self)
    is_infinite = op.Or(op.Equal(first, infinity), op.Equal(second, infinity))
    is_plain = op.Greater(large, op.CastLike(0.0, self))
    ratio = op.Div(small, op.Where(is_plain, large, one))
    root = op.Mul(large, op.Sqrt(op.Add(one, op.Mul(ratio, ratio))))
    return op.Where(
        is_infinite,
        infinity,
        op.Where(op.Equal(first, second), op.Mul(first, op.CastLike(math.sqrt(2), self)), root),
    )


def _is_negative(x: Any) -> Any:
    """Return whether the sign bit is set, also for zero."""
    zero = op.CastLike(0.0, x)
    return op.Or(op.Less(x, zero), op.Less(op.Reciprocal(x), zero))


def _remainder(self, other):  # type: ignore[no-untyped-def]
    divisor = op.CastLike(other, self)
    if self.dtype is not None and not self.dtype.is_floating_point():
        return op.Mod(self, divisor)
    rest, zero = op.Mod(self, divisor, fmod=1), op.CastLike(0.0, self)
    # fmod has the sign of the dividend; the remainder has the sign of the divisor.
    other_sign = op.Less(op.Mul(op.Sign(rest), op.Sign(divisor)), zero)
    return op.Where(other_sign, op.Add(rest, divisor), rest)


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    result = op.CastLike(coefficients[-1], x)
    for coefficient in reversed(coefficients[:-1]):
        result = op.Add(op.Mul(result, x), op.CastLike(coefficient, x))
    return result


_aten = torch.ops.aten


_NEVER_NEGATIVE = ("Shape", "Size")


_AS_INPUTS = ("Squeeze", "Unsqueeze", "Gather", "Slice", "Add", "Mul", "Div", "Max", "Cast")
"""Operators whose result is nonnegative if all inputs are."""


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the translations for torch.onnx; a mechanism becomes one bare custom node."""
    return (
        _scalar_functions()
        | _deviations()
        | {o.torch_op: _translation(o) for o in (OPERATORS | SINGLE_OPERATORS).values()}
        | {
            _aten.adaptive_avg_pool1d.default: _adaptive_avg_pool1d,
            _aten.amax.default: _amax,
            _aten.amin.default: _amin,
            _aten.adaptive_max_pool1d.default: _adaptive_max_pool1d,
            _aten.logcumsumexp.default: logcumsumexp,
            _aten.upsample_linear1d.vec: _upsample_linear1d,
            _aten.var_mean.correction: _var_mean,
            _aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
            python.floordiv: _floordiv,
        }
        | size_translations()
    )


def _translation(operator: Operator) -> Callable[..., Any]:
    """Return a function that emits one bare custom node, with a signature for torch.onnx."""
    for_kernel = {a.name: a.default for a in operator.kernel_attributes}
    emit = getattr(values.Opset(DOMAIN, VERSION), operator.op_type)
    names, attributes = list(operator.inputs), {a.name: a for a in operator.attributes}
    # The torch op has optional inputs behind the attributes.
    arguments = operator.torch_op._schema.arguments
    parameters = [_parameter(a, attributes.get(a.name)) for a in arguments]

    def translate(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
        bound.apply_defaults()
        tensors = [bound.arguments.pop(n) for n in names]
        while tensors[-1] is None:
            tensors.pop()
        return emit(*tensors, **bound.arguments, **for_kernel, **PLUGIN_ATTRIBUTES)

    translate.__name__ = operator.op_type
    translate.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    translate.__annotations__ = {a.name: type(a.default) for a in operator.attributes}
    return translate


def _parameter(argument: torch.Argument, attribute: Attribute | None) -> inspect.Parameter:
    """Return the parameter of an argument of a torch op, which is an attribute or an input."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if attribute is not None:
        value = attribute.default
        return inspect.Parameter(argument.name, kind, default=value, annotation=type(value))
    if argument.has_default_value():
        return inspect.Parameter(argument.name, kind, default=argument.default_value)
    return inspect.Parameter(argument.name, kind)


def _amax(self, dim=(), keepdim=False):  # type: ignore[no-untyped-def]
    return op.ReduceMax(self, [*dim] or None, keepdims=int(keepdim))


def _amin(self, dim=(), keepdim=False):  # type: ignore[no-untyped-def]
    return op.ReduceMin(self, [*dim] or None, keepdims=int(keepdim))


def _var_mean(self, dim=None, correction=None, keepdim=False):  # type: ignore[no-untyped-def]
    """Translate both at once: torch divides a float32 sum by a float64 number of tokens."""
    is_wide = self.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    wide = self if is_wide else op.Cast(self, to=ir.DataType.FLOAT)
    axes = [*dim] if dim else [*range(len(self.shape))]
    mean = op.ReduceMean(wide, axes, keepdims=1)
    deviations = op.Sub(wide, mean)
    total = op.ReduceSum(op.Mul(deviations, deviations), axes, keepdims=1)
    count = op.ReduceProd(op.Gather(op.Shape(self), constant(axes)), keepdims=0)
    free = op.Sub(op.CastLike(count, wide), float(1 if correction is None else correction))
    variance = op.Div(total, op.Max(free, op.CastLike(0.0, wide)))
    results = (op.CastLike(result, self) for result in (variance, mean))
    return tuple(result if keepdim else op.Squeeze(result, axes) for result in results)


def _adaptive_avg_pool1d(self, output_size):  # type: ignore[no-untyped-def]
    if tuple(output_size) == (1,):
        return op.ReduceMean(self, [-1], keepdims=1)
    windows, inside, starts, ends = _windows(self, output_size[0])
    total = op.ReduceSum(op.Where(inside, windows, op.CastLike(0.0, self)), [-1], keepdims=0)
    return op.Div(total, op.CastLike(op.Sub(ends, starts), self))


def _adaptive_max_pool1d(self, output_size):  # type: ignore[no-untyped-def]
    windows, inside, starts, _ = _windows(self, output_size[0])
    candidates = op.Where(inside, windows, op.CastLike(float("-inf"), self))
    largest = op.ReduceMax(candidates, [-1], keepdims=0)
    return largest, op.Add(op.ArgMax(candidates, axis=-1, keepdims=0), starts)


def _upsample_linear1d(input, output_size, align_corners, scale_factors=None):  # type: ignore[no-untyped-def]
    """Translate it whole: its decomposition divides by the tokens minus 1, which may be 0."""
    scales = sizes = None
    if output_size is None:
        scales = op.Constant(value_floats=[1.0, 1.0, *scale_factors])
    else:
        sizes = op.Concat(op.Shape(input, end=2), op.Cast(output_size, to=7), axis=0)
    coordinates = "align_corners" if align_corners else "half_pixel"
    return op.Resize(
        *(input, None, scales, sizes), mode="linear", coordinate_transformation_mode=coordinates
    )


def _windows(x: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """Split the last axis of ``x [..., L]`` into ``count`` windows of equal length, or 1 apart.

    Return ``[..., count, width]``, a mask bool ``[count, width]`` of the positions inside a window,
    and the starts and ends ``[count]`` of the windows.
    """
    length = op.Shape(x, start=-1)
    starts = op.Div(op.Mul(length, constant(range(count))), constant([count]))
    last = op.Add(op.Mul(length, constant(range(1, count + 1))), constant([count - 1]))
    ends = op.Div(last, constant([count]))
    width = op.ReduceMax(op.Sub(ends, starts), keepdims=0)
    zero, one = constant(0), constant(1)
    places = op.Add(op.Unsqueeze(starts, [1]), op.Range(zero, width, one))
    inside = op.Less(places, op.Unsqueeze(ends, [1]))
    return op.Gather(x, op.Min(places, op.Sub(length, one)), axis=-1), inside, starts, ends


def _floordiv(self, other):  # type: ignore[no-untyped-def]
    quotient = op.Div(self, other)
    if _never_negative(self) and _never_negative(other):
        return quotient
    # ONNX rounds to zero and Python rounds down: -(-tokens // 16) counts partial windows too.
    rest = op.Sub(self, op.Mul(quotient, other))
    return op.Sub(quotient, op.Cast(op.Less(op.Mul(rest, other), 0), to=ir.DataType.INT64))


def _never_negative(size: Any) -> bool:
    if isinstance(size, int):
        return size >= 0
    node = size.producer()
    if node is None or node.op_type == "Constant":
        constant = ir.convenience.get_const_tensor(size)
        return constant is not None and bool((constant.numpy() >= 0).all())
    if node.op_type in _NEVER_NEGATIVE:
        return True
    data = node.inputs[:1] if node.op_type in _AS_INPUTS[:4] else node.inputs
    return node.op_type in _AS_INPUTS and all(map(_never_negative, data))


# torch computes standard deviations in float64. torch.onnx squares in the type of the numbers: a
# float32 square is infinite for numbers above 1e19 and 0 for numbers below 1e-22.
def _deviations() -> dict[Any, Callable[..., Any]]:
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
