"""Runtimes behind one small interface. Only this package imports them."""

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aftexport.engines.stop import RunStoppedError, Stop

__all__ = ["Engine", "RunStoppedError", "Stop", "Tensors"]

Tensors = Mapping[str, NDArray[np.generic]]
"""Arrays by name: ``input_ids`` int64 ``[B, T]``, ``lengths`` int64 ``[B]``, and the outputs."""


class Engine(Protocol):
    """A loaded model."""

    name: str
    takes_choice: bool  # whether a run takes `contract.EXPLAINED` among its inputs

    def run(
        self,
        inputs: Tensors,
        stop: Stop | None = None,  # an engine that cannot be interrupted checks it before the run
        outputs: Collection[str] | None = None,  # names of the outputs to return; None for all
    ) -> dict[str, NDArray[np.generic]]:
        """Run the model once.

        Raises:
            RunStoppedError: if ``stop`` ended it.
            EngineError: if the runtime refuses the inputs or fails.
        """
        ...

    def release(self) -> None:
        """Return the memory of earlier runs to the system; the next run allocates it again."""
        ...
