"""Runtimes behind one small interface. Nothing outside this package imports one."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aftexport.engines.stop import RunStoppedError, Stop

__all__ = ["Engine", "RunStoppedError", "Stop", "Tensors"]

Tensors = Mapping[str, NDArray[np.generic]]
"""By name: ``input_ids`` int64 ``[B, T]``, ``lengths`` int64 ``[B]``, ``logits`` ``[B, C]``."""


class Engine(Protocol):
    """A loaded model.

    Attributes:
        name: the engine, as the user selects it.
    """

    name: str

    def run(self, inputs: Tensors, stop: Stop | None = None) -> dict[str, NDArray[np.generic]]:
        """Runs the model once.

        Args:
            inputs: by name.
            stop: ends the run from another thread. An engine that cannot be interrupted
                looks at it before it begins.

        Raises:
            RunStoppedError: where ``stop`` ended it.
            EngineError: where the runtime refuses the inputs or fails.
        """
        ...

    def release(self) -> None:
        """Gives memory that is kept for the next run back to the system; the next takes it anew.

        Raises:
            EngineError: where the runtime fails.
        """
        ...
