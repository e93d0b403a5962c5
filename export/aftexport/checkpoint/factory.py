"""A user's own module, by the name of what builds it."""

import importlib
import sys
from typing import Any

from torch import nn

from aftexport.errors import UsageError


def call_factory(factory: str) -> nn.Module:
    """Builds the module that ``package.module:callable`` returns.

    Raises:
        UsageError: where it cannot be imported or called, or returns something else.
    """
    module_name, _, attribute = factory.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise UsageError(
            f"--factory {factory!r} names no factory.", "Write it as package.module:factory."
        )
    import_from_here()
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise UsageError(
            f"--factory {factory}: importing it raised {type(error).__name__}: {error}.",
            "Check the name, and that it can be imported from here.",
        ) from error
    try:
        module = target()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--factory {factory} raised {type(error).__name__}: {error}.",
            "Give a callable that needs no arguments."
            if isinstance(error, TypeError)
            else f"Call it in Python to see where: from {module_name} import "
            f"{attribute.partition('.')[0]}; {attribute}().",
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"--factory {factory} returned a {type(module).__name__}.",
            "Give a callable that returns an nn.Module.",
        )
    return module


def import_from_here() -> None:
    """Lets the user's code be imported from the working folder, as ``python`` itself does."""
    if "" not in sys.path:
        sys.path.insert(0, "")
