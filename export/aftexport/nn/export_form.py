"""Functions with a second form, which runs while a model is captured for export."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_IS_CAPTURING = ContextVar("is_capturing", default=False)
"""Whether this thread captures a model. Other threads run the functions themselves."""


def exported_as(form: Callable[_P, _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator: the capture of a model runs ``form`` in place of the function.

    The parity check runs the function itself, so it compares both forms::

        @exported_as(lambda q, k, v: recurrent_linear_attention(q, k, v)[0])
        def naive_linear_attention(q, k, v): ...

    Args:
        form: a function of the same arguments, with the same result.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return (form if _IS_CAPTURING.get() else function)(*args, **kwargs)

        return called

    return decorate


@contextmanager
def export_forms() -> Iterator[None]:
    """Run the second form of every function during the block, in this thread."""
    before = _IS_CAPTURING.set(True)
    try:
        yield
    finally:
        _IS_CAPTURING.reset(before)
