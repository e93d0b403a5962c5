"""Conditions on the sizes of inputs, decided by evaluating them for every possible size.

torch.export decides a condition by intervals, which cannot prove that 16 windows of
``-(-tokens // 16)`` tokens always cover the tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

from aftexport.system.contract import MAX_TOKENS
from aftexport.system.internals.torch_shapes import sympy_functions as torch_functions

Numbers = NDArray[np.generic]
Ranges = tuple[tuple[sympy.Symbol, int, int], ...]
"""Each symbol with its smallest and its largest value."""
_SAMPLE = 4096
_OVERFLOW = 2.0**62


class Undecided(Exception):  # noqa: N818 (an outcome, not an error)
    """The evaluation of a condition met an unknown function, a division by zero or an overflow."""


def decide_condition(condition: sympy.Basic, ranges: Ranges) -> bool | None:
    """Return True if a condition holds for all sizes, False if for none, and else None.

    Args:
        condition: a condition on one symbol, evaluated for each of its values; or on two, with
            each value of either evaluated together with some values of the other.
        ranges: the ranges of its symbols, and possibly of others.
    """
    relevant = tuple(r for r in ranges if r[0] in condition.free_symbols)
    if len(relevant) != len(condition.free_symbols) or not 0 < len(relevant) < 3:
        return None
    try:
        return _decide(condition, relevant)
    except Undecided:
        return None


@lru_cache(1024)
def _decide(condition: sympy.Basic, ranges: Ranges) -> bool | None:
    answer: bool | None = None
    for values in _sizes(ranges):
        holds = evaluate(condition, values)
        first = bool(np.ravel(holds)[0])
        if answer not in (None, first) or not (holds == first).all():
            return None
        answer = first
    return answer


def _sizes(ranges: Ranges) -> Iterable[dict[sympy.Symbol, Numbers]]:
    few = [_some(low, high) for _, low, high in ranges]
    yield dict(zip((r[0] for r in ranges), np.ix_(*few), strict=True))
    for i, (symbol, low, high) in enumerate(ranges):
        every = np.arange(low, high + 1)
        if len(ranges) == 1:
            yield {symbol: every}
            continue
        for value in {*few[1 - i][:3], few[1 - i][-1]}:
            yield {symbol: every, ranges[1 - i][0]: np.array([value])}


def _some(low: int, high: int) -> Numbers:
    """Return small values, values across the range, and the last value."""
    spread = np.linspace(low, high, _SAMPLE // 64).astype(np.int64)
    small = np.arange(low, min(low + 66, high + 1))
    return np.unique(np.concatenate([small, spread]))


def evaluate(expression: sympy.Basic, values: Mapping[sympy.Symbol, Numbers]) -> Numbers:
    """Compute an expression for many sizes at once, with the results of Python.

    Args:
        expression: an expression of integers, floats and comparisons.
        values: int64 arrays of broadcastable shapes, one for each symbol.

    Raises:
        Undecided: if it cannot be computed exactly.
    """
    known: dict[sympy.Basic, Any] = dict(values)

    def compute(part: sympy.Basic) -> Any:
        if part not in known:
            known[part] = _number(part) if not part.args else apply(part)
        return known[part]

    def apply(part: sympy.Basic) -> Any:
        function = _FUNCTIONS.get(part.func)
        if function is None:
            raise Undecided(part.func)
        return function(*map(compute, part.args))

    with np.errstate(all="raise", under="ignore"):
        try:
            return np.asarray(compute(expression))
        except ArithmeticError as error:
            raise Undecided(str(error)) from error


def _number(part: sympy.Basic) -> Any:
    if part in (sympy.true, sympy.false):
        return np.bool_(part == sympy.true)
    if isinstance(part, sympy.Integer) and abs(int(part)) < _OVERFLOW:
        return np.int64(int(part))
    if isinstance(part, sympy.Float):
        return np.float64(part)
    raise Undecided(part)


def _multiplied(a: Any, b: Any) -> Any:
    _check_size(np.multiply(a, b, dtype=np.float64))
    return np.multiply(a, b)


def _power(base: Any, exponent: Any) -> Any:
    if np.asarray(exponent).dtype.kind != "f" and (np.asarray(exponent) < 0).any():
        raise Undecided("a negative power")
    _check_size(np.power(base, exponent, dtype=np.float64))
    return np.power(base, exponent)


def _check_size(product: Any) -> None:
    if (np.abs(product) > _OVERFLOW).any():
        raise Undecided("too large for int64")


def _folded(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *parts: reduce(function, parts)


def _integer(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda number: np.asarray(function(number)).astype(np.int64)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    sympy.Add: _folded(np.add),
    sympy.Mul: _folded(_multiplied),
    sympy.Pow: _power,
    sympy.Max: _folded(np.maximum),
    sympy.Min: _folded(np.minimum),
    sympy.Eq: np.equal,
    sympy.Ne: np.not_equal,
    sympy.Lt: np.less,
    sympy.Le: np.less_equal,
    sympy.Gt: np.greater,
    sympy.Ge: np.greater_equal,
    sympy.And: _folded(np.logical_and),
    sympy.Or: _folded(np.logical_or),
    sympy.Not: np.logical_not,
    torch_functions.Max: _folded(np.maximum),
    torch_functions.Min: _folded(np.minimum),
    torch_functions.FloorDiv: np.floor_divide,
    torch_functions.CleanDiv: np.floor_divide,
    torch_functions.Mod: np.mod,
    torch_functions.PythonMod: np.mod,
    torch_functions.IntTrueDiv: np.true_divide,
    torch_functions.FloatTrueDiv: np.true_divide,
    torch_functions.FloatPow: lambda a, b: np.power(a, b, dtype=np.float64),
    torch_functions.PowByNatural: _power,
    torch_functions.ToFloat: lambda number: np.asarray(number, np.float64),
    torch_functions.OpaqueUnaryFn_sqrt: np.sqrt,
    torch_functions.TruncToFloat: np.trunc,
    torch_functions.TruncToInt: _integer(np.trunc),
    torch_functions.FloorToInt: _integer(np.floor),
    torch_functions.CeilToInt: _integer(np.ceil),
    torch_functions.RoundToInt: _integer(np.rint),
}


def find_step(condition: sympy.Basic, symbols: Iterable[sympy.Symbol], limit: int) -> int | None:
    """Return the last size before the only change of a condition.

    Args:
        condition: a condition on these symbols only.
        symbols: the symbols of one size, which all have the same value.
        limit: the maximum size.

    Returns:
        None if the condition is the same for all sizes, or changes more than once.
    """
    sizes = np.arange(1, min(limit, MAX_TOKENS) + 1)
    try:
        holds = np.broadcast_to(evaluate(condition, dict.fromkeys(symbols, sizes)), sizes.shape)
    except Undecided:
        return None
    changes = np.flatnonzero(holds[1:] != holds[:-1])
    return int(changes[0]) + 1 if len(changes) == 1 else None
