"""The choice of a loaded model by its name."""

from collections.abc import Sequence

from aftserve.errors import NotFoundError
from aftserve.serving.service import Service


def named_in(models: Sequence[Service], name: str) -> Service:
    """Return the model with a name.

    Raises:
        NotFoundError: if none of the models has it.
    """
    for model in models:
        if model.name == name:
            return model
    names = ", ".join(repr(model.name) for model in models)
    expected = f"one of the models {names}" if len(models) > 1 else f"the model {names}"
    if not models:
        raise NotFoundError(
            f"Expected the name of a loaded model, got {name[:100]!r}; no model is loaded.",
            "Load one first.",
        )
    raise NotFoundError(f"Expected {expected}, got {name[:100]!r}.", "Name an expected model.")
