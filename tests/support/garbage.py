"""Pause garbage collection while pytest collects, and leave its objects out afterwards.

Tens of thousands of tests and the imported modules are over a million objects, which live until the
end. Every full collection would visit all of them.
"""

import gc
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze the objects that exist once the tests are collected."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
