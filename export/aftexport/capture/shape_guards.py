"""What torch takes for given of a model's sizes because the example has them, and where it does.

It says of itself only what it took, and of a translation not even that: the graph is then one
of the example's length, and fails or differs for others.
"""

import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from linecache import getline
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import get_current_meta
from torch.overrides import resolve_name
from torch.utils._sympy.functions import FloatPow, FloatTrueDiv, IntTrueDiv, Mod, PythonMod, ToFloat

from aftexport.capture.size_conditions import Ranges, decided, step
from aftexport.contract import MAX_TOKENS

_NOT_THE_USERS = {"aftexport", "torch", *sys.stdlib_module_names}
"""Packages of whose lines an error does not speak."""
_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_STARTS = ("aftexport.capture.attempts", "aftexport.capture.capture", "aftexport.lowering.to_onnx")
"""Where torch is called, and what is above has no part in the model."""
_LOOP = re.compile(r"\bfor\b.*\brange\(")
_CONVERSIONS = ("__float__", "__int__", "__index__")
_LOCK = threading.RLock()
_FEW = range(1, 65)


@dataclass(frozen=True)
class ShapeGuard:
    """A condition that holds for the sizes of the example, and not for all.

    Attributes:
        condition: on symbols of sizes.
        sources: symbols with the torch name of the size each stands for; none in a program that
            was read from a file.
        operator: that takes it; empty where the model itself does, or none is known.
        line: of the user's code; empty where none is known.
        of_memory: it decides how a convolution's result lies in memory, and no number of it.
        conversion: how a size becomes a Python number, ``float``, ``int``, ``index`` or
            ``loop``; empty where nothing does.
        example: what each symbol is in the example.
        ranges: the sizes that there can be.
    """

    condition: sympy.Basic
    sources: dict[sympy.Basic, str]
    operator: str
    line: str
    of_memory: bool
    conversion: str
    example: Mapping[sympy.Basic, int]
    ranges: Ranges

    @property
    def holds_always(self) -> bool:
        """Whether it holds for all sizes, which torch did not see."""
        return decided(self.condition, self.ranges) is True

    @property
    def place(self) -> str:
        """Operator and line, to follow a word; empty where neither is known."""
        known = ", ".join(filter(None, (self.operator, self.line)))
        return f" ({known})" if known else ""

    @property
    def is_of_the_model(self) -> bool:
        """Whether the forward itself asks for it, and no operator."""
        return not self.operator

    @property
    def is_of_floats(self) -> bool:
        """Whether it is of a float that was computed of sizes."""
        return bool(self.condition.has(ToFloat, IntTrueDiv, FloatTrueDiv, FloatPow))

    @property
    def is_of_multiples(self) -> bool:
        """Whether it tells multiples of a number of tokens from other lengths."""
        return bool(self._symbols("tokens")) and self.condition.has(Mod, PythonMod)

    def excludes(self, axis: str) -> bool:
        """Whether there are numbers of ``axis``, batch or tokens, for which it does not hold.

        The other axis is as in the example.
        """
        symbols = self._symbols(axis)
        return bool(symbols) and any(not self._holds(dict.fromkeys(symbols, n)) for n in _FEW)

    def step(self, limit: int) -> int | None:
        """The most tokens that are one side of it, where all more are the other; else None.

        Args:
            limit: the most tokens there can be.
        """
        symbols = self._symbols("tokens")
        given = {s: n for s, n in self.example.items() if s not in symbols}
        return step(self.condition.subs(given), symbols, limit) if symbols else None

    def most_tokens(self, limit: int) -> int | None:
        """The most for which it holds, where it does for fewer and not for more; else None."""
        found = self.step(limit)
        holds = found is not None and self._holds(dict.fromkeys(self._symbols("tokens"), found))
        return found if holds else None

    def _symbols(self, axis: str) -> set[sympy.Basic]:
        free = self.condition.free_symbols
        return {s for s in free if axis_names(self.sources.get(s, "")) == axis}

    def _holds(self, sizes: Mapping[sympy.Basic, int]) -> bool:
        try:
            return bool(self.condition.subs({**self.example, **sizes}) != sympy.false)
        except ZeroDivisionError:  # as where it counts windows of (tokens + 1) // 4
            return False

    def __str__(self) -> str:
        named = {s: sympy.Symbol(axis_names(name)) for s, name in self.sources.items()}
        return str(self.condition.subs(named))


@contextmanager
def record_shape_guards(found: list[ShapeGuard], *, decide: bool = False) -> Iterator[None]:
    """Adds what torch takes for given to ``found``, as long as the block runs, in this thread.

    Args:
        found: list to add to.
        decide: tell torch of conditions that hold for all sizes, or for none, where it does not
            see it itself. Its expressions of sizes are then longer, and take more time.
    """
    thread = threading.get_ident()

    with _LOCK:  # the methods are those of the process
        log, static = ShapeEnv._log_guard, ShapeEnv._maybe_evaluate_static

        def noted(env: ShapeEnv, prefix: str, condition: sympy.Basic, forcing_spec: bool) -> None:
            sources = {symbol: name for name, symbol in env.source_to_var.items()}
            # Of a size that values decide, as of x[:, : lengths.max()], no example has one.
            of_inputs = condition.free_symbols <= env.backed_var_to_val.keys()
            if of_inputs and threading.get_ident() == thread and "suppressed" not in prefix:
                example = {s: int(env.backed_var_to_val[s]) for s in condition.free_symbols}
                found.append(
                    ShapeGuard(condition, sources, *_where(), example, _ranges(env, condition))
                )
            log(env, prefix, condition, forcing_spec)

        @wraps(static)  # with the methods of its cache
        def known(env: ShapeEnv, condition: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
            answer = static(env, condition, *args, **kwargs)
            if answer is not None or not decide or threading.get_ident() != thread:
                return answer
            holds = decided(condition, _ranges(env, condition))
            return None if holds is None else sympy.true if holds else sympy.false

        ShapeEnv._log_guard = noted  # type: ignore[assignment, method-assign]
        ShapeEnv._maybe_evaluate_static = known  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            ShapeEnv._log_guard = log  # type: ignore[method-assign]
            ShapeEnv._maybe_evaluate_static = static  # type: ignore[method-assign]


def _ranges(env: ShapeEnv, condition: sympy.Basic) -> Ranges:
    """The sizes that inputs can have; what torch takes for never 0 or 1 can be 1."""
    ranges = []
    for symbol in condition.free_symbols & env.backed_var_to_val.keys():
        found = env.var_to_range[symbol]
        lower = int(found.lower) if found.lower > 2 else 1
        upper = int(found.upper) if found.upper < MAX_TOKENS else MAX_TOKENS
        ranges.append((symbol, lower, upper))
    return tuple(sorted(ranges, key=str))


def axis_names(text: str) -> str:
    """``text`` with batch and tokens for what torch calls these sizes of an input."""
    axes = ("batch", "tokens")
    return re.sub(r"L\['\w+'\]\.size\(\)\[([01])\]", lambda m: axes[int(m[1])], text)


def is_the_users(frame: FrameType) -> bool:
    """Whether a frame runs code that is neither ours, nor torch's, nor Python's own."""
    package = str(frame.f_globals.get("__name__", "torch")).partition(".")[0]
    return package not in _NOT_THE_USERS


def line_of(frame: FrameType, line: int) -> str:
    """How an error names a line of code."""
    return f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"


def last_own_line(meta: Mapping[str, Any]) -> str:
    """Return the user's line that a captured node comes from, as ``line_of`` does; empty if none.

    Args:
        meta: the ``meta`` of the node.
    """
    lines = re.findall(r'File "(.+)", line (\d+), in (\w+)', meta.get("stack_trace") or "")
    own = [found for found in lines if not found[0].startswith(_FOLDERS)]
    return "{}, line {}, in {}".format(*own[-1]) if own else ""


def _where() -> tuple[str, str, bool, str]:
    """Operator and line of what runs now, whether torch is choosing a layout, and a conversion.

    What runs is a forward, or the translation of an operator that was captured in one.
    """
    operator, of_memory, conversion = "", False, ""
    for frame, line in walk_stack(None):
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module in _STARTS:
            break
        if module == "torch" and function in _CONVERSIONS:
            conversion = function.strip("_")
        of_memory |= (module, function) == ("torch._subclasses.fake_impls", "conv")
        if function == "__torch_function__" and "func" in frame.f_locals:
            operator = resolve_name(frame.f_locals["func"]) or operator
        if is_the_users(frame):
            if conversion == "index" and _LOOP.search(getline(frame.f_code.co_filename, line)):
                conversion = "loop"
            return operator, line_of(frame, line), of_memory, "" if operator else conversion
    node = get_current_meta()
    operator = str(node.get("torch_fn", ("", ""))[1]).rpartition(".")[2]
    return operator, last_own_line(node), of_memory, ""
