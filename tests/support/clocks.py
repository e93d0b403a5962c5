"""Another clock for one module: its neighbours and their threads keep that of the system."""

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


def replace_time(
    patch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., object]
) -> None:
    """Replace functions of ``time`` in a module that imports it as a whole."""
    assert module.__dict__["time"] is time or isinstance(module.__dict__["time"], SimpleNamespace)
    patch.setattr(module, "time", SimpleNamespace(**{**vars(time), **functions}))
