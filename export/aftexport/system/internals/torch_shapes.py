"""Parts of torch that decide conditions on the sizes of a model's inputs."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import sympy

from aftexport.system.internals.versions import Versions

VERSIONS = Versions("torch", "2.9", "2.15")

with VERSIONS.named():
    from torch.fx.experimental import _config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.traceback import get_current_meta
    from torch.utils._sympy import functions as sympy_functions

ATTRIBUTES = (
    "_config.backed_size_oblivious",
    "ShapeEnv._log_guard",
    "ShapeEnv._maybe_evaluate_static",
    "ShapeEnv().source_to_var",
    "ShapeEnv().var_to_range",
    *(
        f"sympy_functions.{name}"
        for name in (
            *("CeilToInt", "CleanDiv", "FloatPow", "FloatTrueDiv", "FloorDiv", "FloorToInt"),
            *("IntTrueDiv", "Max", "Min", "Mod", "OpaqueUnaryFn_sqrt", "PowByNatural"),
            *("PythonMod", "RoundToInt", "ToFloat", "TruncToFloat", "TruncToInt"),
        )
    ),
)
"""Attributes of these parts that this module and others use."""

FAKE_CONVOLUTION = ("torch._subclasses.fake_impls", "conv")
"""Module and name of the function that chooses the memory layout of a convolution's result."""

_LOCK = threading.RLock()

__all__ = ["ShapeEnv", "get_current_meta", "sympy_functions"]


def allow_sizes_of_one(is_allowed: bool) -> AbstractContextManager[None]:
    """Let torch take branches that also hold for sizes of 1, or not, during the block."""
    options: AbstractContextManager[None] = _config.patch(  # type: ignore[attr-defined]
        backed_size_oblivious=is_allowed
    )
    return options


def example_sizes(env: ShapeEnv) -> Mapping[sympy.Basic, sympy.Integer]:
    """Return each symbol of an input's size with its value in the example."""
    with VERSIONS.named():
        if hasattr(env, "backed_var_to_val"):
            return env.backed_var_to_val
        return env.var_to_val  # its name in torch 2.9


def size_names(env: ShapeEnv) -> dict[sympy.Basic, str]:
    """Return each symbol of an input's size with torch's name of the size."""
    return {symbol: name for name, symbol in env.source_to_var.items()}


@contextmanager
def observe_conditions(
    on_guard: Callable[[ShapeEnv, str, sympy.Basic], None],
    decide: Callable[[ShapeEnv, sympy.Basic], bool | None],
) -> Iterator[None]:
    """Observe the guards that torch sets on sizes during the block, in all threads.

    ``decide`` answers a condition that torch cannot decide, or leaves it open with None.
    """
    with _LOCK:  # the methods are shared by the whole process
        log, static = ShapeEnv._log_guard, ShapeEnv._maybe_evaluate_static

        def noted(env: ShapeEnv, prefix: str, condition: sympy.Basic, forcing_spec: bool) -> None:
            on_guard(env, prefix, condition)
            log(env, prefix, condition, forcing_spec)

        @wraps(static)  # copies the methods of its cache too
        def evaluated(env: ShapeEnv, condition: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
            answer = static(env, condition, *args, **kwargs)
            if answer is not None:
                return answer
            holds = decide(env, condition)
            return None if holds is None else sympy.true if holds else sympy.false

        ShapeEnv._log_guard = noted  # type: ignore[assignment, method-assign]
        ShapeEnv._maybe_evaluate_static = evaluated  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            ShapeEnv._log_guard = log  # type: ignore[method-assign]
            ShapeEnv._maybe_evaluate_static = static  # type: ignore[method-assign]
