"""torch.onnx's table of translations, read once for all exports of a process.

torch.onnx reads the table at every export. For this it parses the source of 500 functions, which
takes a third of the translation of a small model.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from aftexport.system.internals.torch_translation import ONNXRegistry

_METHOD = "from_torchlib"
_ORIGINAL = vars(ONNXRegistry)[_METHOD]
_read = ONNXRegistry.from_torchlib
_LOCK = threading.RLock()


@contextmanager
def shared_table() -> Iterator[None]:
    """Give torch.onnx copies of the table during the block."""
    with _LOCK:  # the method is shared by the whole process
        setattr(ONNXRegistry, _METHOD, staticmethod(_copied))
        try:
            yield
        finally:
            setattr(ONNXRegistry, _METHOD, _ORIGINAL)


@cache
def _table(opset_version: int) -> ONNXRegistry:
    return _read(opset_version)


def _copied(opset_version: int) -> ONNXRegistry:
    """Return a copy to which torch.onnx can add the translations of one export."""
    table = copy.copy(_table(opset_version))
    table.functions = {target: list(found) for target, found in table.functions.items()}
    return table
