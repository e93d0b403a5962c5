"""Guards that torch sets on a model's sizes, with the operator and the line that set them.

A guard holds for the example and may fail for other sizes. torch reports only its condition, and
for a translation nothing: the graph then fits only the example's length.
"""

import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from linecache import getline
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import sympy
import torch
from torch.overrides import resolve_name

from aftexport.capture.size_conditions import Ranges, decide_condition, find_step
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
    """A condition that holds for the sizes of the example, and not for all sizes.

    Attributes:
        condition: the condition, on symbols of sizes.
        sources: each symbol with torch's name of its size; empty for a program read from a file.
        operator: the operator that set the guard; empty for the model itself, or if unknown.
        line: the line of the user's code; empty if unknown.
        is_of_layout: whether the condition decides only the memory layout of a convolution's
            result, and none of its numbers.
        conversion: the conversion of a size to a Python number, ``float``, ``int``, ``index`` or
            ``loop``; empty without a conversion.
        example: the value of each symbol in the example.
        ranges: the possible values of each symbol.
    """

    condition: sympy.Basic
    sources: dict[sympy.Basic, str]
    operator: str
    line: str
    is_of_layout: bool
    conversion: str
    example: Mapping[sympy.Basic, int]
    ranges: Ranges

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
        """Return the last length before the only change of the condition; else None.

        Args:
            limit: the maximum length in tokens.
        """
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

    Args:
        guards: the list to append to.
        decide: whether to answer conditions that hold for all sizes, or for none, if torch
            cannot prove it. Its expressions of sizes are then longer, and take more time.
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
    """Return the user's line that created a node, in the form of ``line_of``; empty if unknown.

    Args:
        meta: the attribute ``meta`` of the captured node.
    """
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
