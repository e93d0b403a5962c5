"""Spans of tokens with one label, found block by block."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.heads.column import Column, OpenFile
from aftexport.heads.label_scheme import LabelTable, Place, Scheme

UNIT = np.dtype([("label", "i8"), ("score", "f8"), ("start", "i8"), ("end", "i8")])
"""A token or a word: the number of its label, -1 outside; its score, and its range of tokens."""
FIXED_POINT = float(1 << 32)
"""Sums of scores are whole multiples of 1 / FIXED_POINT, so that their order does not matter."""
_RUN = np.dtype([(name, "i8") for name in ("first", "last", "start", "end", "total", "count")])
"""A run of units: its first and last label, its tokens, the sum of its scores, its units."""
_SPAN = np.dtype([("start", "u4"), ("end", "u4"), ("label", "u4"), ("score", "f4")])


@dataclass(frozen=True)
class TokenSpans:
    """The spans of a document in their order, in arrays with one entry for each.

    Attributes:
        starts, ends: the index of the first token, and of the token after the last.
        labels: the number of the label among the head's ``span_labels``.
        scores: the mean score of the tokens or words.
    """

    starts: NDArray[np.uint32]
    ends: NDArray[np.uint32]
    labels: NDArray[np.uint32]
    scores: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.starts)


class SpanBuilder:
    """The spans of units that come in blocks.

    In plain and bio, a span is a run of units of one kind, and ``B-`` starts a new one. This is the
    rule of the TokenClassificationPipeline of transformers. In bioes, a span is ``B-``, any number
    of ``I-``, and ``E-``, or it is one ``S-``; other units are outside. This is the strict rule of
    seqeval.
    """

    def __init__(self, table: LabelTable, scheme: Scheme, open_file: OpenFile | None) -> None:
        self._table, self._is_strict = table, scheme == "bioes"
        self._open = np.empty(0, _RUN)
        self._spans = Column(_SPAN, open_file=open_file)

    def add(self, units: NDArray[Any]) -> None:
        """Add units of type ``UNIT``."""
        runs = np.empty(len(self._open) + len(units), _RUN)
        new = runs[len(self._open) :]
        runs[: len(self._open)] = self._open
        new["first"] = new["last"] = units["label"]
        new["start"], new["end"], new["count"] = units["start"], units["end"], 1
        new["total"] = np.rint(units["score"] * FIXED_POINT)
        merged = self._merge(runs)
        self._open = merged[-1:]
        self._close(merged[:-1])

    def finish(self) -> TokenSpans:
        """Return the spans of all units."""
        self._close(self._open)
        spans = self._spans.array()
        return TokenSpans(spans["start"], spans["end"], spans["label"], spans["score"])

    def _merge(self, runs: NDArray[Any]) -> NDArray[Any]:
        """Return the runs, with each run joined to the one that it continues."""
        if not len(runs):
            return runs
        is_first = np.append(True, ~self._continues(runs["last"][:-1], runs["first"][1:]))
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(runs)) - 1
        merged = runs[firsts]
        merged["last"], merged["end"] = runs["last"][lasts], runs["end"][lasts]
        for sums in ("total", "count"):
            merged[sums] = np.add.reduceat(runs[sums], firsts)
        return merged

    def _continues(self, before: NDArray[np.int64], label: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether a unit with ``label`` is in the span of the unit before it."""
        kinds, places = self._table.kinds, self._table.places
        follows = places[label] != Place.BEGIN
        if self._is_strict:
            follows &= (places[label] != Place.SINGLE) & (places[before] < Place.END)
        return np.asarray((kinds[label] == kinds[before]) & (kinds[label] >= 0) & follows)

    def _close(self, runs: NDArray[Any]) -> None:
        """Keep those runs that are spans."""
        kinds = self._table.kinds[runs["first"]]
        is_span = kinds >= 0
        if self._is_strict:
            first, last = (self._table.places[runs[name]] for name in ("first", "last"))
            is_whole = (first == Place.BEGIN) & (last == Place.END)
            is_span &= is_whole | (first == Place.SINGLE)
        spans = np.empty(int(is_span.sum()), _SPAN)
        runs = runs[is_span]
        spans["start"], spans["end"], spans["label"] = runs["start"], runs["end"], kinds[is_span]
        spans["score"] = runs["total"] / (runs["count"] * FIXED_POINT)
        self._spans.add(spans)
