"""Translations of functions of single numbers, accurate over the whole range of their type.

torch.onnx writes many of them by the textbook formula, ``log(sigmoid(x))`` or ``1 - erf(x)``. Such
formulas cancel, overflow or round to 0 for inputs at which the function is an ordinary number.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import opset18 as op

_aten = torch.ops.aten
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


def scalar_functions() -> dict[Any, Callable[..., Any]]:
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
