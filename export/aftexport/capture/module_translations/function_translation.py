"""A function of a library, and the function that takes its place during a capture."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aftexport.internals.versions import Versions

TRANSFORMERS = Versions("transformers", "5.16", "5.24")
_PLACE = "transformers.models."


@dataclass(frozen=True)
class FunctionTranslation:
    """A function of transformers, known by its name and its parameters, and its translation.

    Several files of the library hold copies of one function.

    Attributes:
        name: the name of the function in the file of a model.
        parameters: its first parameters.
        replacement: a function of these parameters with the same result, in our operators.
    """

    name: str
    parameters: tuple[str, ...]
    replacement: Callable[..., Any]

    def fits(self, function: Any) -> bool:
        """Return whether a function has the known place and parameters."""
        if not str(getattr(function, "__module__", "")).startswith(_PLACE):
            return False
        given = tuple(inspect.signature(function).parameters)
        return given[: len(self.parameters)] == self.parameters


def is_of_transformers(module_name: str) -> bool:
    """Return whether a Python module is the file of a model of transformers."""
    return module_name.startswith(_PLACE)


def is_known_version() -> bool:
    """Return whether the installed transformers is one whose functions are known."""
    try:
        installed = version(TRANSFORMERS.library)
    except PackageNotFoundError:
        return False
    return _number(TRANSFORMERS.oldest) <= _number(installed) <= _number(TRANSFORMERS.newest)


def _number(text: str) -> tuple[int, ...]:
    """Return major and minor number of a version."""
    return tuple(int(part) for part in text.split(".")[:2])
