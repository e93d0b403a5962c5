"""Schemes of token labels, whose prefixes, such as ``B-``, mark the tokens of a span."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

Scheme = Literal["plain", "bio", "bioes"]
OUTSIDE = "O"
"""The label of tokens outside every span, in every scheme."""
_PREFIXED = re.compile(r"([BIESLU])-(.+)", re.DOTALL)
_SETS: tuple[tuple[Scheme, frozenset[str]], ...] = (
    ("bio", frozenset("BI")),
    ("bioes", frozenset("BIES")),
    ("bioes", frozenset("BILU")),
)
"""The prefixes of each scheme; L and U are other letters for E and S."""


class Place(IntEnum):
    """The place of a token in its span."""

    BEGIN = 0
    INSIDE = 1
    END = 2
    SINGLE = 3


_PLACES = {
    "B": Place.BEGIN,
    "I": Place.INSIDE,
    "E": Place.END,
    "L": Place.END,
    "S": Place.SINGLE,
    "U": Place.SINGLE,
}


def scheme_of(labels: Sequence[str]) -> Scheme:
    """Return the scheme that the names of labels declare.

    The scheme is bio or bioes if all names are ``O`` or have a prefix of that scheme.
    """
    matches = [_PREFIXED.fullmatch(label) for label in labels if label != OUTSIDE]
    prefixes = {match[1] if match else "" for match in matches}
    found = (scheme for scheme, letters in _SETS if prefixes and prefixes <= letters)
    return next(found, "plain")


@dataclass(frozen=True)
class LabelTable:
    """The span of each label, in arrays by the number of the label.

    The last entry, which has the index -1, is a label outside every span.

    Attributes:
        spans: the label of each kind of span.
        kinds: the number of each label's kind of span; -1 outside.
        places: the ``Place`` of each label.
    """

    spans: tuple[str, ...]
    kinds: NDArray[np.int64]
    places: NDArray[np.int64]

    @classmethod
    def read(cls, labels: Sequence[str], scheme: Scheme) -> Self:
        """Return the table of labels.

        Raises:
            ValueError: if a label does not follow bioes. In bio, a label without ``B-`` or ``I-``
                continues a span of its own name, as in the transformers library.
        """
        names: dict[str, int] = {}
        kinds, places = [], []
        for label in labels:
            name, place = label, Place.INSIDE
            match = None if scheme == "plain" else _PREFIXED.fullmatch(label)
            if match and (scheme == "bioes" or match[1] in "BI"):
                name, place = match[2], _PLACES[match[1]]
            elif scheme == "bioes" and label != OUTSIDE:
                raise ValueError(
                    f"labels: expected O, or names with B-, I-, E- and S-, in bioes, got {label!r}"
                )
            kinds.append(-1 if name == OUTSIDE else names.setdefault(name, len(names)))
            places.append(place)
        return cls(tuple(names), np.array([*kinds, -1]), np.array([*places, Place.INSIDE]))
