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
    """A loaded model.

    Attributes:
        name: the name by which the user selects the engine.
        takes_choice: whether a run takes ``contract.EXPLAINED`` among its inputs.
    """

    name: str
    takes_choice: bool

    def run(
        self,
        inputs: Tensors,
        stop: Stop | None = None,
        outputs: Collection[str] | None = None,
    ) -> dict[str, NDArray[np.generic]]:
        """Run the model once.

        Args:
            inputs: arrays by name.
            stop: request to end the run from another thread. An engine that cannot be
                interrupted checks it before the run.
            outputs: names of the outputs to return; None for all.

        Raises:
            RunStoppedError: if ``stop`` ended it.
            EngineError: if the runtime refuses the inputs or fails.
        """
        ...

    def release(self) -> None:
        """Return the memory of earlier runs to the system; the next run allocates it again.

        Raises:
            EngineError: if the runtime fails.
        """
        ...
