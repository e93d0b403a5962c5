"""The run of a recurrence over a document, chunk by chunk."""

from collections.abc import Generator, Mapping, Sequence

import numpy as np

from aftexport.bundle.chunked_plan import Recurrence
from aftexport.chunked.document import Document, NextValues
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.chunked.other_summaries import Chunk
from aftexport.chunked.recurrence_states import LEFT_STATE, NEXT_STATE, RIGHT_STATE
from aftexport.chunked.spill import Array, States
from aftexport.errors import EngineError


def advances(recurrence: Recurrence, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Return the chunks whose tokens advance the reverse state, which the first never needs."""
    return () if recurrence.direction == "forward" else chunks[:0:-1]


class RecurrenceRun:
    """The run of one recurrence over one document.

    Args:
        archive: the graphs.
        number: the number of the stage.
        recurrence: the direction and the states of the stage.
        document: the document, with the values before the stage.
    """

    def __init__(
        self, archive: OpenedArchive, number: int, recurrence: Recurrence, document: Document
    ) -> None:
        self._archive = archive
        self._number = number
        self._recurrence = recurrence
        self._document = document

    def advanced(self, chunks: Sequence[Chunk], right: States) -> Generator[None, None, None]:
        """Push the state on the right of each chunk, from the last chunk to the first.

        A forward recurrence has none.

        Raises:
            EngineError: if the runtime refuses the graph or fails.
            StorageError: if there is not enough space for the states.
        """
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
        """Append the values after the stage, from the first chunk on.

        Args:
            chunks: all chunks, or the first ones.
            right: the states of ``advanced``.
            values_after: takes the values.

        Raises:
            EngineError: if the runtime refuses the graph or fails.
            StorageError: if there is not enough space for the values.
        """
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
