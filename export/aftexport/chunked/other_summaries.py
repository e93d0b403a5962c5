"""The summaries of all other chunks, for each chunk of a document."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from aftexport.bundle.chunked_plan import ChunkedStage
from aftexport.chunked.document_state import Level
from aftexport.chunked.spill import Array, Summaries, Summary

Chunk = tuple[int, int]
"""The first token of a chunk, and the token after its last."""


class OtherSummaries:
    """The summaries for each chunk of all tokens beside its own and those in its margins.

    Args:
        stage: the attention of the summaries.
        merge: a function from several summaries to one.
        summaries: the files of the summaries.
    """

    def __init__(
        self,
        stage: ChunkedStage,
        merge: Callable[[Sequence[Summary]], Summary],
        summaries: Summaries,
    ) -> None:
        self._stage = stage
        self._merge = merge
        self._summaries = summaries
        self._chunks: list[int] = []
        self._pieces: list[list[int]] = []

    def add(self, pieces: Sequence[Summary]) -> None:
        """Append the next chunk by its summaries, cut at the margins of its neighbors."""
        self._pieces.append([self._summaries.append(piece) for piece in pieces])
        self._chunks.append(self._summaries.append(self._merge(pieces)))

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        """Yield keys ``[1, S, *]`` and values ``[1, S, D]`` for chunk after chunk."""
        stage, tokens, read = self._stage, self._summaries.tokens, self._summaries.read
        after = self._after()
        before: Summary | None = None  # all chunks before the previous one
        for index, pieces in enumerate(self._pieces):
            start, end = tokens(pieces[0])[0], tokens(pieces[-1])[1]
            near: list[int] = []
            if index > 1:
                chunk = read(self._chunks[index - 2])
                before = chunk if before is None else self._merge([before, chunk])
            if index:
                near += [p for p in self._pieces[index - 1] if tokens(p)[1] <= start - stage.left]
            if not stage.causal and index + 1 < len(self._pieces):
                near += [p for p in self._pieces[index + 1] if tokens(p)[0] >= end + stage.right]
                near += after[index + 2 : index + 3]
            others = [] if before is None else [before]
            others += map(read, near)
            if others:
                yield joined(others)
            else:
                one = read(pieces[0])
                yield one.keys[:, :0], one.values[:, :0]

    def _after(self) -> list[int]:
        """Return the summaries of each chunk together with all later ones."""
        # Subtraction of earlier chunks from a total would cancel digits.
        after: list[int] = []
        following: Summary | None = None
        for place in () if self._stage.causal else reversed(self._chunks):
            chunk = self._summaries.read(place)
            following = chunk if following is None else self._merge([chunk, following])
            after.append(self._summaries.append(following))
        return after[::-1]


def joined(summaries: Sequence[Summary | Level]) -> tuple[Array, Array]:
    """Return the keys and values of all summaries, of which there must be at least one."""
    keys = np.concatenate([s.keys for s in summaries], 1)
    return keys, np.concatenate([s.values for s in summaries], 1)


def cut_at_margins(chunk: Chunk, stage: ChunkedStage, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return a chunk in pieces, cut at the ends of its neighbors' margins.

    The neighbors attend to the tokens within their margins, and to summaries of the other pieces.
    """
    start, end = chunk
    if len(chunks) == 1:
        return [chunk]
    return list(pairwise(sorted({start, start + stage.right, end - stage.left, end})))
