"""Functions of ``math`` on a size that is free, while a model is captured.

They ask for a Python float, and torch then takes the example's size for the only one.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOCK = threading.RLock()


@contextmanager
def free_sizes_in_math() -> Iterator[None]:
    """Lets ``math.sqrt``, ``log`` and their like take sizes that are free, in this thread.

    A root is a symbolic number, whose whole part can be a size. The others are tensors
    ``[]`` of the default type, as there are no symbols for them.
    """
    thread = threading.get_ident()

    def wrap(name: str, symbolic: Callable[..., Any]) -> Callable[..., Any]:
        own = getattr(math, name)

        def called(*numbers: Any) -> Any:
            free = threading.get_ident() == thread and any(map(_is_free, numbers))
            return symbolic(*numbers) if free else own(*numbers)

        return called

    with _LOCK:  # the module is that of the process
        own = {name: getattr(math, name) for name in _SYMBOLIC}
        for name, symbolic in _SYMBOLIC.items():
            setattr(math, name, wrap(name, symbolic))
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(math, name, function)


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
