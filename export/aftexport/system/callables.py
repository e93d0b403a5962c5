"""Callables of a user, which an option names as ``package.module:callable``."""

import importlib
import sys
from typing import Any

from aftexport.errors import UsageError


def import_callable(name: str, option: str) -> Any:
    """Import the callable that an option names.

    Raises:
        UsageError: if it cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise UsageError(
            f"{option} must be package.module:callable, got {name!r}.",
            f"Write it as package.module:{option.removeprefix('--')}.",
        )
    import_from_here()
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise UsageError(
            f"{option} {name}: the import raised {type(error).__name__}: {error}.",
            "Check the name, and that it can be imported from this folder.",
        ) from error
    return target


def import_from_here() -> None:
    """Add the working folder to the import path, as ``python`` itself does."""
    if "" not in sys.path:
        sys.path.insert(0, "")
