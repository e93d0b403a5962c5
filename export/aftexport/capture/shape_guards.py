"""Guards that torch sets on a model's sizes, with the operator and the line that set them.

A guard holds for the example and may fail for other sizes. torch reports only its condition, and
for a translation nothing: the graph then fits only the example's length.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from linecache import getline
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch.overrides import resolve_name

from aftexport.system.contract import MAX_TOKENS
from aftexport.system.internals.torch_shapes import (
    FAKE_CONVOLUTION,
    ShapeEnv,
    example_sizes,
    get_current_meta,
    observe_conditions,
    size_names,
    sympy_functions,
)
from aftexport.system.internals.torch_shapes import sympy_functions as torch_functions

_Numbers = NDArray[np.generic]
Ranges = tuple[tuple[sympy.Symbol, int, int], ...]
"""Each symbol with its smallest and its largest value."""
# torch.export decides a condition by intervals, which cannot prove that 16 windows of
# -(-tokens // 16) tokens always cover the tokens. Here it is evaluated for every possible size.
_SAMPLE = 4096
_OVERFLOW = 2.0**62


class _Undecided(Exception):  # noqa: N818 (an outcome, not an error)
    """The evaluation of a condition met an unknown function, a division by zero or an overflow."""


_NOT_THE_USERS = {"aftexport", "torch", *sys.stdlib_module_names}
"""Packages whose lines are never named in an error."""
_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_STARTS = ("aftexport.capture.attempts", "aftexport.capture.capture", "aftexport.lowering.to_onnx")
"""Modules that call torch: the frames above them are not part of the model."""
_LOOP = re.compile(r"\bfor\b.*\brange\(")
_CONVERSIONS = ("__float__", "__int__", "__index__")
_FEW = range(1, 65)
_FLOATS = (
    sympy_functions.ToFloat,
    sympy_functions.IntTrueDiv,
    sympy_functions.FloatTrueDiv,
    sympy_functions.FloatPow,
)
_REMAINDERS = (sympy_functions.Mod, sympy_functions.PythonMod)


@dataclass(frozen=True)
class ShapeGuard:
    """A condition that holds for the sizes of the example, and not for all sizes."""

    condition: sympy.Basic  # the condition, on symbols of sizes
    # Each symbol with torch's name of its size; empty for a program read from a file.
    sources: dict[sympy.Basic, str]
    operator: str  # the operator that set the guard; empty for the model itself, or if unknown
    line: str
    # Whether the condition decides only the memory layout of a convolution's result, and none of
    # its numbers.
    is_of_layout: bool
    # Conversion of a size to a Python number, ``float``, ``int``, ``index`` or ``loop``; empty
    # without a conversion.
    conversion: str
    example: Mapping[sympy.Basic, int]  # the value of each symbol in the example
    ranges: Ranges  # the possible values of each symbol

    @property
    def is_always_true(self) -> bool:
        """True if the condition holds for all sizes, which torch could not prove."""
        return decide_condition(self.condition, self.ranges) is True

    @property
    def place(self) -> str:
        """Operator and line in parentheses after a space; empty if both are unknown."""
        place = ", ".join(filter(None, (self.operator, self.line)))
        return f" ({place})" if place else ""

    @property
    def is_of_the_model(self) -> bool:
        """True if the forward itself set the guard, not an operator."""
        return not self.operator

    @property
    def is_of_floats(self) -> bool:
        """True if the condition is on a float computed from sizes."""
        return bool(self.condition.has(*_FLOATS))

    @property
    def is_of_multiples(self) -> bool:
        """True if the condition separates multiples of a number of tokens from other lengths."""
        return bool(self._symbols("tokens")) and self.condition.has(*_REMAINDERS)

    def excludes(self, axis: str) -> bool:
        """Return whether the condition fails for a size of ``axis``, batch or tokens, up to 64.

        The other axis has the size of the example.
        """
        symbols = self._symbols(axis)
        return bool(symbols) and any(not self._holds(dict.fromkeys(symbols, n)) for n in _FEW)

    def step(self, limit: int) -> int | None:
        """Return the last length before the only change of the condition; else None."""
        symbols = self._symbols("tokens")
        others = {s: n for s, n in self.example.items() if s not in symbols}
        return find_step(self.condition.subs(others), symbols, limit) if symbols else None

    def max_tokens(self, limit: int) -> int | None:
        """Return the maximum length if the condition holds exactly up to a length; else None."""
        last = self.step(limit)
        holds = last is not None and self._holds(dict.fromkeys(self._symbols("tokens"), last))
        return last if holds else None

    def _symbols(self, axis: str) -> set[sympy.Basic]:
        free = self.condition.free_symbols
        return {s for s in free if axis_names(self.sources.get(s, "")) == axis}

    def _holds(self, sizes: Mapping[sympy.Basic, int]) -> bool:
        try:
            return bool(self.condition.subs({**self.example, **sizes}) != sympy.false)
        except ZeroDivisionError:  # such as a count of windows of (tokens + 1) // 4 tokens
            return False

    def __str__(self) -> str:
        named = {s: sympy.Symbol(axis_names(name)) for s, name in self.sources.items()}
        return str(self.condition.subs(named))


@contextmanager
def record_shape_guards(guards: list[ShapeGuard], *, decide: bool = False) -> Iterator[None]:
    """Append the guards that torch sets to ``guards``, during the block, in this thread.

    If ``decide``, conditions that hold for all sizes, or for none, are answered where torch cannot
    prove it. Its expressions of sizes are then longer, and take more time.
    """
    thread = threading.get_ident()

    def note(env: ShapeEnv, prefix: str, condition: sympy.Basic) -> None:
        sizes = example_sizes(env)
        # A size that depends on values, as in x[:, : lengths.max()], has no example.
        has_example = condition.free_symbols <= sizes.keys()
        if has_example and threading.get_ident() == thread and "suppressed" not in prefix:
            example = {symbol: int(sizes[symbol]) for symbol in condition.free_symbols}
            names, ranges = size_names(env), _ranges(env, condition)
            guards.append(ShapeGuard(condition, names, *_where(), example, ranges))

    def answer(env: ShapeEnv, condition: sympy.Basic) -> bool | None:
        if not decide or threading.get_ident() != thread:
            return None
        return decide_condition(condition, _ranges(env, condition))

    with observe_conditions(note, answer):
        yield


def _ranges(env: ShapeEnv, condition: sympy.Basic) -> Ranges:
    """Return the possible sizes of inputs; a size that torch assumes to be above 1 can be 1."""
    ranges = []
    for symbol in condition.free_symbols & example_sizes(env).keys():
        bounds = env.var_to_range[symbol]
        lower = int(bounds.lower) if bounds.lower > 2 else 1
        upper = int(bounds.upper) if bounds.upper < MAX_TOKENS else MAX_TOKENS
        ranges.append((symbol, lower, upper))
    return tuple(sorted(ranges, key=str))


def axis_names(text: str) -> str:
    """Return ``text`` with torch's names of these input sizes replaced by batch and tokens."""
    axes = ("batch", "tokens")
    return re.sub(r"L\['\w+'\]\.size\(\)\[([01])\]", lambda m: axes[int(m[1])], text)


def is_the_users(frame: FrameType) -> bool:
    """Return whether a frame runs code outside aftexport, torch and the standard library."""
    package = str(frame.f_globals.get("__name__", "torch")).partition(".")[0]
    return package not in _NOT_THE_USERS


def line_of(frame: FrameType, line: int) -> str:
    """Return the text by which an error names a line of code."""
    return f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"


def last_own_line(meta: Mapping[str, Any]) -> str:
    """Return the user's line that created a node, in the form of ``line_of``; empty if unknown."""
    lines = re.findall(r'File "(.+)", line (\d+), in (\w+)', meta.get("stack_trace") or "")
    # torch names code that it wrote itself <eval_with_key>.
    own = [line for line in lines if not line[0].startswith((*_FOLDERS, "<"))]
    return "{}, line {}, in {}".format(*own[-1]) if own else ""


def _where() -> tuple[str, str, bool, str]:
    """Return the current operator and line, whether torch chooses a layout, and the conversion.

    The running code is a forward, or the translation of an operator captured in a forward.
    """
    operator, is_of_layout, conversion = "", False, ""
    for frame, line in walk_stack(None):
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module in _STARTS:
            break
        if module == "torch" and function in _CONVERSIONS:
            conversion = function.strip("_")
        is_of_layout |= (module, function) == FAKE_CONVOLUTION
        if function == "__torch_function__" and "func" in frame.f_locals:
            operator = resolve_name(frame.f_locals["func"]) or operator
        if is_the_users(frame):
            if conversion == "index" and _LOOP.search(getline(frame.f_code.co_filename, line)):
                conversion = "loop"
            return operator, line_of(frame, line), is_of_layout, "" if operator else conversion
    node = get_current_meta()
    operator = str(node.get("torch_fn", ("", ""))[1]).rpartition(".")[2]
    return operator, last_own_line(node), is_of_layout, ""


def decide_condition(condition: sympy.Basic, ranges: Ranges) -> bool | None:
    """Return True if a condition holds for all sizes, False if for none, and else None.

    A condition on one symbol is evaluated for each of its values. Of one on two symbols, each value
    of either is evaluated together with some values of the other.
    """
    relevant = tuple(r for r in ranges if r[0] in condition.free_symbols)
    if len(relevant) != len(condition.free_symbols) or not 0 < len(relevant) < 3:
        return None
    try:
        return _decide(condition, relevant)
    except _Undecided:
        return None


@lru_cache(1024)
def _decide(condition: sympy.Basic, ranges: Ranges) -> bool | None:
    answer: bool | None = None
    for values in _sizes(ranges):
        holds = _evaluate(condition, values)
        first = bool(np.ravel(holds)[0])
        if answer not in (None, first) or not (holds == first).all():
            return None
        answer = first
    return answer


def _sizes(ranges: Ranges) -> Iterable[dict[sympy.Symbol, _Numbers]]:
    few = [_some(low, high) for _, low, high in ranges]
    yield dict(zip((r[0] for r in ranges), np.ix_(*few), strict=True))
    for i, (symbol, low, high) in enumerate(ranges):
        every = np.arange(low, high + 1)
        if len(ranges) == 1:
            yield {symbol: every}
            continue
        for value in {*few[1 - i][:3], few[1 - i][-1]}:
            yield {symbol: every, ranges[1 - i][0]: np.array([value])}


def _some(low: int, high: int) -> _Numbers:
    """Return small values, values across the range, and the last value."""
    spread = np.linspace(low, high, _SAMPLE // 64).astype(np.int64)
    small = np.arange(low, min(low + 66, high + 1))
    return np.unique(np.concatenate([small, spread]))


def _evaluate(expression: sympy.Basic, values: Mapping[sympy.Symbol, _Numbers]) -> _Numbers:
    """Compute an expression for many sizes at once, with the results of Python.

    The values are int64 arrays of broadcastable shapes.

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
            raise _Undecided(part.func)
        return function(*map(compute, part.args))

    with np.errstate(all="raise", under="ignore"):
        try:
            return np.asarray(compute(expression))
        except ArithmeticError as error:
            raise _Undecided(str(error)) from error


def _number(part: sympy.Basic) -> Any:
    if part in (sympy.true, sympy.false):
        return np.bool_(part == sympy.true)
    if isinstance(part, sympy.Integer) and abs(int(part)) < _OVERFLOW:
        return np.int64(int(part))
    if isinstance(part, sympy.Float):
        return np.float64(part)
    raise _Undecided(part)


def _multiplied(a: Any, b: Any) -> Any:
    _check_size(np.multiply(a, b, dtype=np.float64))
    return np.multiply(a, b)


def _power(base: Any, exponent: Any) -> Any:
    if np.asarray(exponent).dtype.kind != "f" and (np.asarray(exponent) < 0).any():
        raise _Undecided("a negative power")
    _check_size(np.power(base, exponent, dtype=np.float64))
    return np.power(base, exponent)


def _check_size(product: Any) -> None:
    if (np.abs(product) > _OVERFLOW).any():
        raise _Undecided("too large for int64")


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

    The symbols are of one size, and all have the same value. The result is None if the condition
    is the same for all sizes, or changes more than once.
    """
    sizes = np.arange(1, min(limit, MAX_TOKENS) + 1)
    try:
        holds = np.broadcast_to(_evaluate(condition, dict.fromkeys(symbols, sizes)), sizes.shape)
    except _Undecided:
        return None
    changes = np.flatnonzero(holds[1:] != holds[:-1])
    return int(changes[0]) + 1 if len(changes) == 1 else None
