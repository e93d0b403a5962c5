"""The outputs per token of a document in chunks, handed over block by block or joined."""

from collections.abc import Callable, Mapping

import numpy as np

from aftexport.chunked.spill import Array
from aftexport.errors import EngineError, UsageError

Sink = Callable[[Array], None]
"""A receiver of the rows ``[1, n, width]`` of an output per token, chunk after chunk."""


class TokenOutputs:
    """The outputs per token of one document.

    Args:
        widths: each output, with its width.
        tokens: the number of tokens of the document.
        sinks: the receivers of outputs; an output without one is joined in memory.

    Raises:
        UsageError: if a sink is for another output.

    Attributes:
        joined: each output without a sink, ``[1, tokens, width]``.
    """

    def __init__(self, widths: Mapping[str, int], tokens: int, sinks: Mapping[str, Sink]) -> None:
        if unknown := sinks.keys() - widths.keys():
            raise UsageError(
                f"A sink must be for an output per token ({', '.join(widths) or 'none'}), got one "
                f"for {min(unknown)}.",
                "Remove the sink.",
            )
        self.joined: dict[str, Array] = {}
        self._widths = widths
        self._tokens = tokens
        self._sinks = sinks
        self._next = 0

    def add(self, outputs: Mapping[str, Array], end: int) -> None:
        """Hand over the rows of the next chunk.

        Args:
            outputs: the rows of each output.
            end: the token after the last of the chunk.

        Raises:
            EngineError: if an output is missing or has another shape.
        """
        start, self._next = self._next, end
        for name, width in self._widths.items():
            rows = outputs.get(name)
            if rows is None or rows.shape != (1, end - start, width):
                raise EngineError(
                    f"Expected the output {name} [1, {end - start}, {width}] as in the manifest, "
                    f"got {'none' if rows is None else list(rows.shape)}.",
                    "Export the model again.",
                )
            if name in self._sinks:
                self._sinks[name](rows)
                continue
            if name not in self.joined:
                self.joined[name] = np.empty((1, self._tokens, width), rows.dtype)
            self.joined[name][:, start:end] = rows
