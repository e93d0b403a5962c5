"""The maximum tokens of a document in an ONNX model, by runs of rising length."""

from collections.abc import Callable, Sequence

from aftexport.errors import EngineError

MAX_TRIED_TOKENS = 4096
"""Longer runs of a softmax attention would take seconds and gigabytes each."""


def longest_document(run: Callable[[int], object], sizes: Sequence[int]) -> int | None:
    """Return the maximum tokens of a document; None for no limit.

    A table of positions ends the documents if the model fails one token after its rows. Sizes over
    ``MAX_TRIED_TOKENS`` count as such tables, without a run.

    Args:
        run: runs the model on one document of this many tokens, and raises EngineError if it fails.
        sizes: the sizes of constants that may belong to positions, ascending.

    Raises:
        EngineError: if the model fails on one token.
    """
    run(1)
    works = 1
    for size in sizes:
        if size > MAX_TRIED_TOKENS:
            return size
        if not _runs(run, size + 1):
            return _largest(run, works, size + 1)
        works = size + 1
    return None


def _largest(run: Callable[[int], object], works: int, fails: int) -> int:
    """Return the largest length that runs, by bisection."""
    while fails - works > 1:
        middle = (works + fails) // 2
        if _runs(run, middle):
            works = middle
        else:
            fails = middle
    return works


def _runs(run: Callable[[int], object], tokens: int) -> bool:
    try:
        run(tokens)
    except EngineError:
        return False
    return True
