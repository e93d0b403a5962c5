"""What torch takes for given of a model's sizes because the example has them, and where it does.

It says of itself only what it took, and of a translation not even that: the graph is then one
of the example's length, and fails or differs for others.
"""

import re
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import get_current_meta
from torch.overrides import resolve_name

_NOT_THE_USERS = {"aftexport", "torch", *sys.stdlib_module_names}
"""Packages of whose lines an error does not speak."""
_FOLDERS = tuple(str(Path(f).parent) for f in (torch.__file__, __file__))
_STARTS = ("aftexport.capture", "aftexport.lowering")
"""Where torch is called, and what is above has no part in the model."""
_LOCK = threading.RLock()
_FEW = range(1, 65)


@dataclass(frozen=True)
class Taken:
    """A condition that holds for the sizes of the example, and not for all.

    Attributes:
        condition: on symbols of sizes.
        sources: symbols with the torch name of the size each stands for; none in a program that
            was read from a file.
        operator: that takes it; empty where the model itself does, or none is known.
        line: of the user's code; empty where none is known.
        of_memory: it decides how a convolution's result lies in memory, and no number of it.
        example: what each symbol is in the example.
    """

    condition: sympy.Basic
    sources: dict[sympy.Basic, str]
    operator: str
    line: str
    of_memory: bool
    example: Mapping[sympy.Basic, int]

    @property
    def place(self) -> str:
        """Operator and line, to follow a word; empty where neither is known."""
        known = ", ".join(filter(None, (self.operator, self.line)))
        return f" ({known})" if known else ""

    def excludes(self, axis: str) -> bool:
        """Whether there are numbers of ``axis``, batch or tokens, for which it does not hold.

        The other axis is as in the example.
        """
        symbols = self._symbols(axis)
        return bool(symbols) and any(not self._holds(dict.fromkeys(symbols, n)) for n in _FEW)

    def most_tokens(self, limit: int) -> int | None:
        """The most for which it holds; None where it does not for 1, or does for ``limit`` too."""
        symbols = self._symbols("tokens")

        def fails(tokens: int) -> bool:
            return not self._holds(dict.fromkeys(symbols, tokens))

        if not symbols or fails(1) or not fails(limit):
            return None
        return bisect_left(range(1, limit + 1), True, key=fails)

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
def noting_sizes(found: list[Taken]) -> Iterator[None]:
    """Adds what torch takes for given to ``found``, as long as the block runs, in this thread."""
    thread = threading.get_ident()

    with _LOCK:  # the method is that of the process
        original = ShapeEnv._log_guard

        def noted(env: ShapeEnv, prefix: str, condition: sympy.Basic, forcing_spec: bool) -> None:
            sources = {symbol: name for name, symbol in env.source_to_var.items()}
            # Of a size that values decide, as of x[:, : lengths.max()], no example has one.
            of_inputs = condition.free_symbols <= env.backed_var_to_val.keys()
            if of_inputs and threading.get_ident() == thread and "suppressed" not in prefix:
                example = {s: int(env.backed_var_to_val[s]) for s in condition.free_symbols}
                found.append(Taken(condition, sources, *_where(), example))
            original(env, prefix, condition, forcing_spec)

        ShapeEnv._log_guard = noted  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            ShapeEnv._log_guard = original  # type: ignore[method-assign]


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


def _where() -> tuple[str, str, bool]:
    """Operator and line of what runs now, and whether torch is choosing a layout in memory.

    What runs is a forward, or the translation of an operator that was captured in one.
    """
    operator, of_memory = "", False
    for frame, line in walk_stack(None):
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module in _STARTS:
            break
        of_memory |= (module, function) == ("torch._subclasses.fake_impls", "conv")
        if function == "__torch_function__" and "func" in frame.f_locals:
            operator = resolve_name(frame.f_locals["func"]) or operator
        if is_the_users(frame):
            return operator, line_of(frame, line), of_memory
    node = get_current_meta()
    lines = re.findall(r'File "(.+)", line (\d+), in (\w+)', node.get("stack_trace") or "")
    lines = [found for found in lines if not found[0].startswith(_FOLDERS)]
    operator = str(node.get("torch_fn", ("", ""))[1]).rpartition(".")[2]
    return operator, "{}, line {}, in {}".format(*lines[-1]) if lines else "", of_memory
