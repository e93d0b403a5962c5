"""Requests of the extension for model repositories, the same over HTTP and gRPC."""

from collections.abc import Iterable, Mapping

from aftexport.errors import InputError
from aftserve.api.open_inference.descriptions import VERSION
from aftserve.api.open_inference.schemas import ModelIndex
from aftserve.serving.model_entry import ModelState

EXTENSION = "model_repository"
"""Name of the extension in the metadata of the server."""
_DEPENDENTS = "unload_dependents"


def index_of(states: Iterable[ModelState], *, ready: bool) -> list[ModelIndex]:
    """Return the entries of models.

    Args:
        states: the states of the models.
        ready: whether to leave out models that are not ready.
    """
    return [
        ModelIndex(name=one.name, version=VERSION, state=one.state, reason=one.reason)
        for one in states
        if one.state == "READY" or not ready
    ]


def check_load(parameters: Mapping[str, object]) -> None:
    """Raise InputError if the parameters of a load are not empty."""
    for name in parameters:
        raise InputError(
            f"Expected no parameter of a load, got {name[:100]!r}.",
            "Put the changed bundle in the place of the model's bundle, and load the model without "
            "parameters.",
        )


def check_unload(parameters: Mapping[str, object]) -> None:
    """Raise InputError unless the only parameter of an unload is a false ``unload_dependents``."""
    for name, value in parameters.items():
        if name != _DEPENDENTS or value is not False:
            given = "another value" if name == _DEPENDENTS else repr(name[:100])
            raise InputError(
                f"Expected no parameter of an unload but {_DEPENDENTS}, which is false, got "
                f"{given}.",
                "Unload each model by its name: no model depends on another.",
            )
