"""The inputs of a model with their limits; apart, as commands on ONNX files import no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aftexport.errors import UsageError
from aftexport.extra_inputs import ExtraInput
from aftexport.system.contract import main_input


@dataclass(frozen=True)
class InputSpec:
    """The inputs of a model."""

    # ``input_ids`` (int64 ``[batch, tokens]``) or ``input_features`` (float32 ``[batch, tokens,
    # features]``), and ``lengths`` (int64 ``[batch]``) if the model takes it
    names: tuple[str, ...]
    vocab_size: int | None  # the number of ids; every id is below it. None for a model of features
    num_features: int | None  # the number of features of a token; None for a model of ids
    embedding: str  # the parameter with a row for each id; empty if there is none
    max_tokens: int | None  # the maximum length of a document in tokens; None for no bound
    extras: tuple[ExtraInput, ...] = ()  # the extra inputs, with the maximum of integers

    @property
    def main(self) -> str:
        """The input with the tokens."""
        return main_input(self.names)

    def in_order(self, inputs: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Return the model's inputs in their order."""
        return {name: inputs[name] for name in self.names}

    def check_max_length(self, asked: int | None) -> None:
        """Raise UsageError if a requested maximum length exceeds that of the model."""
        if asked is not None and self.max_tokens is not None and self.max_tokens < asked:
            raise UsageError(
                f"--max-length must be at most {self.max_tokens} for the export of this model, got "
                f"{asked}.",
                f"Give {self.max_tokens} or less.",
            )
