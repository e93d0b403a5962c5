"""The comparison of a response's fields with those of the bare model."""

from typing import Any

import numpy as np

from load.every_head import Expected
from load.messages import Found

_DECISIONS = {"label", "labels", "holds", "spans"}
"""Fields that follow from the numbers; a rounding may change them where two numbers are close."""


def is_answer(found: Found, expected: Expected, bound: float) -> bool:
    """Return whether all fields of a response equal those of the bare model.

    Args:
        found: fields of the response.
        expected: fields of the bare model, which may be more.
        bound: maximum error of a number, relative to the larger of it and 1. With 0 every bit must
            be equal; otherwise only the numbers and the bundle are compared.
    """
    return bool(found) and _is_same(found, expected, bound)


def _is_same(found: Any, expected: Any, bound: float) -> bool:
    if isinstance(found, dict):
        return found.keys() <= expected.keys() and all(
            _is_same(value, expected[name], bound)
            for name, value in found.items()
            if not (bound and name in _DECISIONS)
        )
    if isinstance(found, np.ndarray):
        wanted = np.asarray(expected, found.dtype)
        return found.shape == wanted.shape and _are_close(found, wanted, bound)
    if isinstance(found, list) and found and isinstance(found[0], dict):  # spans
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(_is_same(a, b, bound) for a, b in pairs)
    if bound and isinstance(found, list):
        return len(found) == len(expected) and _are_close(
            np.array(found), np.array(expected), bound
        )
    if bound and isinstance(found, float):
        return _are_close(np.array(found), np.array(expected), bound)
    return bool(found == expected)


def _are_close(found: Any, expected: Any, bound: float) -> bool:
    if not bound:
        return bool(found.tobytes() == expected.tobytes())
    return bool((np.abs(found - expected) <= bound * np.maximum(1, np.abs(expected))).all())
