"""A function of a library, and the function that takes its place during a capture."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from aftexport.system.internals.versions import Versions

VERSIONS = Versions("transformers", "5.16", "5.24")
_PLACE = "transformers.models."


@dataclass(frozen=True)
class FunctionTranslation:
    """A function of transformers, known by its name and its parameters, and its translation.

    Several files of the library hold copies of one function.

    Attributes:
        name: the name of the function in the file of a model.
        parameters: its first parameters.
        replacement: a function of these parameters with the same result, in our operators.
        has_loop: whether the function loops over tokens, so that torch.export cannot capture it.
        place: the start of the name of the Python module that defines the function.
    """

    name: str
    parameters: tuple[str, ...]
    replacement: Callable[..., Any]
    has_loop: bool = True
    place: str = _PLACE

    def fits(self, function: Any) -> bool:
        """Return whether a function has the known place, version and parameters."""
        if not str(getattr(function, "__module__", "")).startswith(self.place):
            return False
        oldest, newest = map(_number, (VERSIONS.oldest, VERSIONS.newest))
        given = tuple(inspect.signature(function).parameters)
        is_known = oldest <= _number(installed_version()) <= newest
        return is_known and given[: len(self.parameters)] == self.parameters


def is_of_transformers(module_name: str) -> bool:
    """Return whether a Python module is the file of a model of transformers."""
    return module_name.startswith(_PLACE)


def installed_version() -> str:
    """Return the version of transformers."""
    return version(VERSIONS.library)


def _number(text: str) -> tuple[int, ...]:
    """Return major and minor number of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
