"""Functions of ``math`` on dynamic sizes, while a model is captured.

By themselves they request a Python float, and torch then fixes the size to that of the example.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn

_LOCK = threading.RLock()


@contextmanager
def free_sizes_in_math(model: nn.Module) -> Iterator[list[str]]:
    """Let the functions of ``_SYMBOLIC`` accept dynamic sizes, in this thread.

    A root is a symbolic number, whose whole part can be a size. The other results are tensors
    ``[]`` of the default type, because sympy has no symbols for them.

    Args:
        model: the model, whose forwards may import these functions by other names.

    Yields:
        A list that receives the name of each function whose result became a tensor.
    """
    thread, used = threading.get_ident(), list[str]()

    def wrap(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def called(*numbers: Any) -> Any:
            if threading.get_ident() != thread or not any(map(_is_free, numbers)):
                return own(*numbers)
            result = _SYMBOLIC[name](*numbers)
            if isinstance(result, torch.Tensor):
                used.append(name)
            return result

        return called

    with _LOCK:  # the module math is shared by the whole process
        wrapped = {getattr(math, name): wrap(name, getattr(math, name)) for name in _SYMBOLIC}
        places = [
            (space, name, value)
            for space in (vars(math), *_globals(model))
            for name, value in space.items()
            if isinstance(value, BuiltinFunctionType) and value in wrapped
        ]
        for space, name, value in places:
            space[name] = wrapped[value]
        try:
            yield used
        finally:
            for space, name, value in places:
                space[name] = value


def _globals(model: nn.Module) -> list[dict[str, Any]]:
    """Return the globals of the Python modules that define the forwards."""
    classes = {type(module) for module in model.modules()}
    names = {cls.__module__ for cls in classes if not issubclass(cls, torch.jit.ScriptModule)}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]


def _is_free(number: Any) -> bool:
    return isinstance(number, torch.SymInt | torch.SymFloat | torch.Tensor)


def _tensor(number: Any) -> Any:
    if isinstance(number, torch.Tensor):
        return number
    return torch.scalar_tensor(number, dtype=torch.get_default_dtype())


def _root(number: Any) -> Any:
    return number.sqrt() if isinstance(number, torch.Tensor) else number**0.5


def _logarithm(number: Any, base: Any = None) -> Any:
    natural = _tensor(number).log()
    return natural if base is None else natural / _tensor(base).log()


_SYMBOLIC: dict[str, Callable[..., Any]] = {
    "sqrt": _root,
    "pow": lambda base, exponent: base**exponent,
    "log": _logarithm,
    "log2": lambda number: _tensor(number).log2(),
    "log10": lambda number: _tensor(number).log10(),
    "log1p": lambda number: _tensor(number).log1p(),
    "exp": lambda number: _tensor(number).exp(),
    "tanh": lambda number: _tensor(number).tanh(),
}
