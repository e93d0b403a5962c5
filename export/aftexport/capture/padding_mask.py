"""The mask of padding that a captured forward receives in place of lengths."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_GIVEN = ContextVar[Tensor | None]("given_mask", default=None)
"""The mask of the running forward; each thread has its own."""


@contextmanager
def given_mask(mask: Tensor) -> Iterator[None]:
    """Note the mask that a forward receives, during the block."""
    before = _GIVEN.set(mask)
    try:
        yield
    finally:
        _GIVEN.reset(before)


def is_given_mask(mask: Tensor) -> bool:
    """Return whether a tensor is the mask that the forward received, unchanged.

    It is then 1 for the first tokens of a document, and 0 for the padding after them.
    """
    return mask is _GIVEN.get()
