"""Runtimes behind one small interface. Nothing outside this package imports one."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[np.generic]]
"""By name: ``input_ids`` int64 ``[B, T]``, ``lengths`` int64 ``[B]``, ``logits`` ``[B, C]``."""


class Engine(Protocol):
    """A loaded model.

    Attributes:
        name: the engine, as the user selects it.
    """

    name: str

    def run(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Runs the model once.

        Raises:
            EngineError: where the runtime refuses the inputs or fails.
        """
        ...
