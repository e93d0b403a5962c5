"""A user's own module, built by a factory with a given name."""

import importlib
import sys
from typing import Any

from torch import nn

from aftexport.errors import UsageError


def call_factory(factory: str) -> nn.Module:
    """Build the module that ``package.module:callable`` returns.

    Raises:
        UsageError: if the callable cannot be imported or called, or does not return a module.
    """
    module_name, _, attribute = factory.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise UsageError(
            f"--factory must be package.module:callable, got {factory!r}.",
            "Write it as package.module:factory.",
        )
    import_from_here()
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise UsageError(
            f"--factory {factory}: the import raised {type(error).__name__}: {error}.",
            "Check the name, and that it can be imported from this folder.",
        ) from error
    try:
        module = target()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--factory {factory}: the call raised {type(error).__name__}: {error}.",
            "Give a callable without required arguments."
            if isinstance(error, TypeError)
            else f"Call it in Python to find the line: from {module_name} import "
            f"{attribute.partition('.')[0]}; {attribute}().",
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"--factory {factory} must return an nn.Module, got a {type(module).__name__}.",
            "Give a callable that returns the module.",
        )
    return module


def import_from_here() -> None:
    """Add the working folder to the import path, as ``python`` itself does."""
    if "" not in sys.path:
        sys.path.insert(0, "")
