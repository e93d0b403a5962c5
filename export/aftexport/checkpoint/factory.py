"""A user's own module, built by a factory with a given name."""

from torch import nn

from aftexport.errors import UsageError
from aftexport.system.callables import import_callable


def call_factory(factory: str) -> nn.Module:
    """Build the module that ``package.module:callable`` returns.

    Raises:
        UsageError: if the callable cannot be imported or called, or does not return a module.
    """
    target = import_callable(factory, "--factory")
    try:
        module = target()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--factory {factory}: the call raised {type(error).__name__}: {error}.",
            "Give a callable without required arguments."
            if isinstance(error, TypeError)
            else f"Call it in Python to find the line: {_call(factory)}.",
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"--factory {factory} must return an nn.Module, got a {type(module).__name__}.",
            "Give a callable that returns the module.",
        )
    return module


def _call(factory: str) -> str:
    """Return the line of Python that calls a factory."""
    module, _, attribute = factory.partition(":")
    return f"from {module} import {attribute.partition('.')[0]}; {attribute}()"
