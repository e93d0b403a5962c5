"""The inputs of a module that is captured, with examples of them."""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aftexport.errors import UsageError
from aftexport.extra_inputs import ExtraInput
from aftexport.system.contract import AXES, FEATURES, IDS, LENGTHS, MAX_FEATURES


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a module."""

    names: tuple[str, ...]  # names of the inputs, one of ``contract.INPUTS`` and the extra inputs
    num_features: int | None = None  # number of features of a token; None for a model of token ids
    extras: tuple[ExtraInput, ...] = ()

    @property
    def axes(self) -> dict[str, dict[int, str]]:
        """The names of the dynamic axes of each input."""
        axes = AXES | {extra.name: extra.axes for extra in self.extras}
        return {name: axes[name] for name in self.names}

    def examples(self, tokens: int) -> dict[str, Tensor]:
        """Return the inputs for two documents of ``tokens`` tokens."""
        inputs = {
            IDS: torch.zeros(2, tokens, dtype=torch.int64),
            FEATURES: torch.zeros(2, tokens, self.num_features or 0),
            LENGTHS: torch.full((2,), tokens, dtype=torch.int64),
            **{extra.name: torch.from_numpy(extra.zeros(2, tokens)) for extra in self.extras},
        }
        return {name: inputs[name] for name in self.names}


def features_of(module: nn.Module, asked: int | None = None) -> int | None:
    """Return the declared number of features of a token; None for a model of token ids.

    The module declares it by its own ``num_features`` or that of its config, unless its forward
    takes ``input_ids``. ``asked`` is the number by ``--features`` or ``--feature-file``.

    Raises:
        UsageError: if the number is outside the bounds, or differs from the module's own.
    """
    declared = _declared(module)
    if asked is not None and declared is not None and asked != declared:
        raise UsageError(
            f"The number of features must be {declared}, the num_features of the model, got "
            f"{asked}.",
            "Correct --features or --feature-file, or leave it out.",
        )
    number = declared if asked is None else asked
    if number is not None and not 1 <= number <= MAX_FEATURES:
        raise UsageError(
            f"The number of features must be from 1 to {MAX_FEATURES}, got {number}.",
            "Give such a number by --features.",
        )
    return number


def _declared(module: nn.Module) -> int | None:
    parameters = inspect.signature(module.forward).parameters
    if IDS in parameters and FEATURES not in parameters:
        return None
    for owner in (module, getattr(module, "config", None)):
        number = getattr(owner, "num_features", None)
        if isinstance(number, int) and not isinstance(number, bool):
            return number
    return None
