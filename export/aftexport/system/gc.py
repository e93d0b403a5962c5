"""Control of Python's garbage collection while many lasting objects are made.

The collector visits every object each time their number has grown by a quarter. The imports of an
export create a third of a million objects.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def collect_frozen() -> None:
    """Collect all garbage, also among frozen objects, which stay thawed.

    An object that a thread still holds would be frozen for ever if the others were frozen again.
    """
    gc.unfreeze()
    gc.collect()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collection during the block, which makes lasting objects such as modules."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
