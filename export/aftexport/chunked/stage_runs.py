"""The runs of one attention or recurrence over the chunks of a document."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from aftexport.bundle.manifest import ChunkedStage, KeptKeys, Pooling, Recurrence
from aftexport.chunked.document import (
    ATTENDED,
    KEY,
    LEFT_STATE,
    LOG_SUM,
    MARK,
    NEXT_STATE,
    QUERY,
    QUERY_START,
    RIGHT_STATE,
    VALUE,
    Array,
    Document,
    Level,
    NextValues,
    States,
    Summaries,
    Summary,
)
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.errors import EngineError

Chunk = tuple[int, int]
"""The first token of a chunk, and the token after its last."""


class OtherSummaries:
    """The summaries for each chunk of all tokens beside its own and those in its margins."""

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
    """Return a chunk in pieces, cut at the ends of its neighbors' margins."""
    # The neighbors attend to the tokens within their margins, and to summaries of the other pieces.
    start, end = chunk
    if len(chunks) == 1:
        return [chunk]
    return list(pairwise(sorted({start, start + stage.right, end - stage.left, end})))


def advances(recurrence: Recurrence, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Return the chunks whose tokens advance the reverse state, which the first never needs."""
    return () if recurrence.direction == "forward" else chunks[:0:-1]


class RecurrenceRun:
    """The run of one recurrence over one document."""

    def __init__(
        self, archive: OpenedArchive, number: int, recurrence: Recurrence, document: Document
    ) -> None:
        self._archive = archive
        self._number = number
        self._recurrence = recurrence
        self._document = document

    def advanced(self, chunks: Sequence[Chunk], right: States) -> Generator[None, None, None]:
        """Push the state on the right of each chunk, from the last chunk to the first."""
        if self._recurrence.direction == "forward":
            return
        state = self._first_state()
        right.push(state)
        chunks = advances(self._recurrence, chunks)
        if not chunks:
            return
        engine = self._archive.engine(f"{self._number}.advance")
        for start, end in chunks:
            inputs = self._document.inputs(engine, start, end)
            state = self._state_of(engine.run({**inputs, RIGHT_STATE: state}))
            right.push(state)
            yield

    def applied(
        self, chunks: Sequence[Chunk], right: States, values_after: NextValues
    ) -> Generator[None, None, None]:
        """Append the values after the stage of all chunks, or of the first ones."""
        engine = self._archive.engine(f"{self._number}.apply")
        direction, shape = self._recurrence.direction, (1, *self._recurrence.shape)
        left = self._first_state()
        for place, (start, end) in enumerate(chunks):
            inputs = self._document.inputs(engine, start, end)
            if direction != "reverse":
                inputs[LEFT_STATE] = left
            if direction != "forward":
                inputs[RIGHT_STATE] = right.read(place, shape)
            outputs = dict(engine.run(inputs))
            if direction != "reverse":
                left = self._state_of(outputs)
                del outputs[NEXT_STATE]
            values_after.append(outputs, slice(0, end - start))
            yield

    def _first_state(self) -> Array:
        return np.zeros((1, *self._recurrence.shape), np.float32)

    def _state_of(self, outputs: Mapping[str, Array]) -> Array:
        """Return a copy of the state among outputs, which may hold all memory of a run."""
        expected, state = (1, *self._recurrence.shape), outputs.get(NEXT_STATE)
        if state is None or state.shape != expected:
            raise EngineError(
                f"{self._archive.name}: expected a state of shape {list(expected)} as in the "
                f"manifest, got {'none' if state is None else list(state.shape)}.",
                "Export the model again.",
            )
        return state.copy()


class SoftmaxRun:
    """The run of one softmax attention over one document.

    The values per token of ``projected`` are in files that its caller closes.
    """

    def __init__(
        self,
        archive: OpenedArchive,
        number: int,
        keys: KeptKeys,
        document: Document,
        projected: NextValues,
    ) -> None:
        self._archive = archive
        self._number = number
        self._keys = keys
        self._document = document
        self._projected = projected

    def projected(self, chunks: Sequence[Chunk]) -> Generator[None, None, None]:
        """Append query, key and value of every chunk."""
        engine = self._archive.engine(f"{self._number}.project")
        for start, end in chunks:
            outputs = engine.run(self._document.inputs(engine, start, end))
            self._projected.append(outputs, slice(0, end - start))
            yield

    def applied(
        self, chunks: Sequence[Chunk], block_tokens: int, values_after: NextValues
    ) -> Generator[None, None, None]:
        """Append the values after the stage of all chunks, or of the first ones."""
        attend = self._archive.engine(f"{self._number}.attend")
        apply = self._archive.engine(f"{self._number}.apply")
        rows, tokens = self._projected.rows, len(self._document.tokens)
        for start, end in chunks:
            query = rows[QUERY].read(start, end)
            attended: Mapping[str, Array] = {}
            for low, high in key_blocks(self._keys, (start, end), tokens, block_tokens):
                block = {name: rows[name].read(low, high) for name in (KEY, VALUE)}
                part = attend.run({**block, QUERY: query, QUERY_START: np.array([start - low])})
                attended = merged(attended, part)
                yield
            inputs = self._document.inputs(apply, start, end, attended)
            values_after.append(apply.run(inputs), slice(0, end - start))
            yield


def key_blocks(keys: KeptKeys, chunk: Chunk, tokens: int, block_tokens: int) -> list[Chunk]:
    """Return blocks of keys, among them all that the queries of a chunk see.

    A narrow window has one block. Others are cut at multiples of ``block_tokens``.
    """
    # The runtime's memory grows with the number of different sizes.
    start, end = chunk
    low = 0 if keys.window_left is None else max(start - keys.window_left, 0)
    high = tokens if keys.window_right is None else min(end + keys.window_right, tokens)
    if high - low <= (2 if keys.is_window else 1) * block_tokens:
        return [(low, high)]
    firsts = range(low - low % block_tokens, high, block_tokens)
    return [(first, min(first + block_tokens, tokens)) for first in firsts]


def merged(first: Mapping[str, Array], second: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the attention of the same queries to the keys of both parts; ``first`` may be empty.

    With L the log sums, the weight of a part is exp(L_part - log(exp(L_first) + exp(L_second))).
    """
    if not first:
        return second
    total = np.logaddexp(first[LOG_SUM], second[LOG_SUM])
    # The sum of a query that sees no key yet is 0, and its logarithm minus infinity.
    finite = np.maximum(total, np.finfo(np.float32).min)
    attended: Array = np.zeros(first[ATTENDED].shape, np.float32)
    by_head = attended.reshape(*total.shape, -1)
    for part in (first, second):
        weights = np.exp(part[LOG_SUM] - finite)
        np.add(by_head, part[ATTENDED].reshape(by_head.shape) * weights[..., None], out=by_head)
    return {ATTENDED: attended, LOG_SUM: total}


def _largest(before: Array, new: Array) -> Array:
    """Return the k largest values of each channel among those of both parts, ``[B, k, D]``."""
    both = np.sort(np.concatenate([before, new], 1), 1)[:, ::-1]  # NaN comes first
    return both[:, : before.shape[1]]


def _largest_and_ties(before: Array, new: Array) -> Array:
    """Return such values, and in one more row the number of tokens with the least of them."""
    largest = _largest(before[:, :-1], new[:, :-1])
    least = largest[:, -1:]
    # A part counts the ties of its own least value, and has all its values above.
    ties = [
        np.where(part[:, -2:-1] == least, part[:, -1:], np.sum(part[:, :-1] == least, 1)[:, None])
        for part in (before, new)
    ]
    return np.concatenate([largest, ties[0] + ties[1]], 1).astype(before.dtype)


_COMBINE: Mapping[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "max": np.maximum,
    "logsumexp": np.logaddexp,
    "top_k": _largest,
    "ties": _largest_and_ties,
}


def combine_pooled(
    pooling: Mapping[str, Pooling], before: Mapping[str, Array], new: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the values of the tokens of ``before`` and the later ones of ``new``, by name."""
    combined: dict[str, Array] = {}
    for name, value in new.items():
        match pooling[name]:
            case "first":
                combined[name] = before[name]
            case "marked":
                # Of equal marks, the first one counts, as in ArgMax.
                is_larger = np.greater(new[MARK], before[MARK]).all()
                combined[name] = value if is_larger else before[name]
            case how:
                combined[name] = _COMBINE[how](before[name], value)
    return combined
