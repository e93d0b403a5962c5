"""Python's garbage collection, kept from what is no garbage.

It goes through every object there is each time their number has grown by a quarter, and once more
when the process ends. Of what an export imports alone there are a third of a million.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Nothing is collected while the block makes what will stay: modules, or lists of a request."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def no_collection_at_exit() -> None:
    """The end of the process frees everything anyway."""
    atexit.register(gc.freeze)
