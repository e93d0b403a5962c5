"""A document that runs in chunks: its tokens, its extra inputs, and values kept between layers."""

import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError, StorageError
from aftexport.extra_inputs import ExtraValues
from aftexport.system.contract import FEATURES, IDS, LENGTHS

Array = NDArray[np.generic]

_VALUES = "values between layers"


@contextmanager
def storing(values: str) -> Iterator[None]:
    """Raise StorageError if the values of a document cannot be stored."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"The {values} of a document cannot be stored ({error.strerror}).",
            "Free some space, name another folder by --spill, or send shorter documents.",
        ) from error


class Rows:
    """Arrays ``[1, T, C]``, joined along T in a file without a name, which its close removes.

    Raises:
        StorageError: if the folder takes no file.
    """

    @storing(_VALUES)
    def __init__(self, folder: Path | None) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, closed by the caller
        self.count = 0
        self._like: Array = np.empty((1, 0, 0))

    @storing(_VALUES)
    def append(self, rows: Array) -> None:
        """Append rows to the file; raise StorageError if there is not enough space."""
        self._like = rows[:, :0].copy()  # a view would keep all rows in memory
        self.count += rows.shape[1]
        self.file.write(np.ascontiguousarray(rows).data)
        self.file.flush()  # otherwise a full disk would be noticed only on close

    @storing(_VALUES)
    def read(self, start: int, end: int) -> Array:
        """Return the rows from ``start`` to ``end``, ``[1, end - start, C]``.

        Raises:
            EngineError: if there are fewer rows.
            StorageError: if the file cannot be read.
        """
        if end > self.count:
            raise EngineError(
                f"Expected {end} rows of a value between layers, got {self.count}.",
                "Export the model again.",
            )
        width = self._like.shape[2]
        self.file.seek(start * width * self._like.itemsize)
        rows = np.empty((1, end - start, width), self._like.dtype)
        self.file.readinto(rows.data)
        self.file.seek(0, 2)
        return rows


@dataclass(frozen=True)
class Summary:
    """Keys ``[1, S, *]`` and values ``[1, S, D]`` for the tokens from ``start`` to ``end``."""

    start: int
    end: int
    keys: Array
    values: Array

    @classmethod
    def of(cls, outputs: Mapping[str, Array], start: int, end: int) -> Self:
        """Return a summary with copies of outputs, which may hold all memory of a run."""
        return cls(start, end, outputs["few_keys"].copy(), outputs["few_values"].copy())


@dataclass(frozen=True)
class Level:
    """The summary of tokens of a growing document: keys ``[1, S, *]`` and values ``[1, S, D]``."""

    tokens: int
    keys: Array
    values: Array


class Summaries:
    """A sequence of summaries in two files, which a stack closes."""

    def __init__(self, folder: Path | None, files: ExitStack) -> None:
        self._keys, self._values = Rows(folder), Rows(folder)
        files.enter_context(self._keys.file)
        files.enter_context(self._values.file)
        self._places: list[tuple[int, int, int, int]] = []

    def append(self, summary: Summary) -> int:
        """Append a summary and return its index."""
        first = self._keys.count
        self._keys.append(summary.keys)
        self._values.append(summary.values)
        self._places.append((summary.start, summary.end, first, self._keys.count))
        return len(self._places) - 1

    def tokens(self, index: int) -> tuple[int, int]:
        """Return the first token of a summary, and the token after its last."""
        return self._places[index][:2]

    def read(self, index: int) -> Summary:
        """Return the summary with an index of ``append``."""
        start, end, first, last = self._places[index]
        return Summary(start, end, self._keys.read(first, last), self._values.read(first, last))


class States:
    """A stack of states of one shape in a file, the last one first."""

    def __init__(self, folder: Path | None, files: ExitStack) -> None:
        self._rows = Rows(folder)
        files.enter_context(self._rows.file)

    def push(self, state: Array) -> None:
        """Append a state."""
        self._rows.append(state.reshape(1, 1, -1))

    def read(self, depth: int, shape: tuple[int, ...]) -> Array:
        """Return the state below ``depth`` others, in a shape."""
        place = self._rows.count - 1 - depth
        return self._rows.read(place, place + 1).reshape(shape)


FIRST_POSITION = "chunk_first_position"
"""The input with the position of a run's first token in the document, int64 ``[1]``."""


LEFT_STATE = "chunk_left_state"
"""The input with the state of all tokens before a chunk, float32 ``[1, *shape]``."""


RIGHT_STATE = "chunk_right_state"
"""The input with the state of all tokens after a chunk, float32 ``[1, *shape]``."""


NEXT_STATE = "chunk_next_state"
"""The output with the state for the next chunk, float32 ``[1, *shape]``."""


QUERY, KEY, VALUE = "chunk_query", "chunk_key", "chunk_value"
"""The values per token of a softmax attention, float32 ``[1, T, *]``."""


QUERY_START = "chunk_query_start"
"""The input with the position of the first query behind the first key, int64 ``[1]``."""


MARK = "chunk_mark"
"""The pooled value with the largest mark of a chunk's tokens, ``[1, 1]``."""


ATTENDED, LOG_SUM = "chunk_attended", "chunk_log_sum"
"""The result of a softmax attention, and the logarithm of each head's sum of weights."""


class Tokens(Protocol):
    """The tokens of a document, an array or an object that reads them from a file."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        ...

    def __getitem__(self, tokens: slice, /) -> NDArray[Any]:
        """Return consecutive tokens, int64 ``[n]`` or float32 ``[n, F]``."""
        ...


@dataclass(frozen=True)
class Document:
    """A document's tokens and extra inputs, and the kept values of its tokens."""

    tokens: Tokens
    extras: ExtraValues
    kept: Mapping[str, Rows]

    def inputs(
        self,
        engine: OnnxRuntimeEngine,
        start: int,
        end: int,
        late: Mapping[str, Array] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """Return the inputs of an engine for the tokens from ``start`` to ``end``.

        ``late`` has values of the whole document, such as those pooled from its tokens.
        """
        known = {**self.extras.part(start, end).batch(), **late}
        inputs = {name: known[name] for name in engine.input_names if name in known}
        for name in engine.input_names:
            if name in (IDS, FEATURES):
                inputs[name] = self.tokens[start:end][None]
            elif name == LENGTHS:
                inputs[name] = np.array([end - start])
            elif name == FIRST_POSITION:
                inputs[name] = np.array([start])
            elif name in self.kept:
                inputs[name] = self.kept[name].read(start, end)
        return inputs


class NextValues:
    """The values per token after a stage, chunk after chunk, in files that a stack closes."""

    def __init__(self, folder: Path | None, files: ExitStack) -> None:
        self._folder = folder
        self._files = files
        self.rows: dict[str, Rows] = {}

    def append(self, outputs: Mapping[str, Array], rows: slice) -> None:
        """Append rows of each output ``[1, T, C]`` of a run."""
        for name, values in outputs.items():
            if name not in self.rows:
                self.rows[name] = Rows(self._folder)
                self._files.enter_context(self.rows[name].file)
            self.rows[name].append(values[:, rows])

    def with_earlier(self, document: Document, keeps: Collection[str]) -> dict[str, Rows]:
        """Return these values and those of ``keeps`` from before; close the files of the others."""
        for name, old in document.kept.items():
            if name in keeps:
                self.rows[name] = old
            else:
                old.file.close()
        return self.rows
