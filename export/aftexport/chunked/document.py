"""A document that runs in chunks: its tokens, its extra inputs, and values kept between layers."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aftexport.chunked.spill import Array, Rows
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.extra_inputs import ExtraValues
from aftexport.system.contract import FEATURES, IDS, LENGTHS

FIRST_POSITION = "chunk_first_position"
"""The input with the position of a run's first token in the document, int64 ``[1]``."""


LEFT_STATE = "chunk_left_state"
"""The input with the state of all tokens before a chunk, float32 ``[1, *shape]``."""


RIGHT_STATE = "chunk_right_state"
"""The input with the state of all tokens after a chunk, float32 ``[1, *shape]``."""


NEXT_STATE = "chunk_next_state"
"""The output with the state for the next chunk, float32 ``[1, *shape]``."""


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
        self._kept: dict[str, Rows] = {}

    def append(self, outputs: Mapping[str, Array], rows: slice) -> None:
        """Append rows of each output ``[1, T, C]`` of a run."""
        for name, values in outputs.items():
            if name not in self._kept:
                self._kept[name] = Rows(self._folder)
                self._files.enter_context(self._kept[name].file)
            self._kept[name].append(values[:, rows])

    def with_earlier(self, document: Document, keeps: Collection[str]) -> dict[str, Rows]:
        """Return these values and those of ``keeps`` from before; close the files of the others."""
        for name, old in document.kept.items():
            if name in keeps:
                self._kept[name] = old
            else:
                old.file.close()
        return self._kept
