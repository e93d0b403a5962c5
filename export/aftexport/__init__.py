"""ONNX export and deployment of linear-attention models.

``import aftexport`` does not import torch: a server needs only a bundle.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from aftexport._version import __version__

if TYPE_CHECKING:
    from aftexport.checkpoint import load, save
    from aftexport.chunked.incremental_model import IncrementalModel
    from aftexport.options import EngineOptions, ExportOptions, ModelSource
    from aftexport.pipeline.export import export

__all__ = [
    "EngineOptions",
    "ExportOptions",
    "IncrementalModel",
    "ModelSource",
    "__version__",
    "export",
    "load",
    "save",
]

# ONNX Runtime's wheels report usage and store an identifier in the home folder on import. A tool
# that handles private documents must not do this.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


_HOMES = {
    "EngineOptions": "aftexport.options",
    "ExportOptions": "aftexport.options",
    "IncrementalModel": "aftexport.chunked.incremental_model",
    "ModelSource": "aftexport.options",
    "export": "aftexport.pipeline.export",
    "load": "aftexport.checkpoint",
    "save": "aftexport.checkpoint",
}
"""The module of each name, which is imported when the name is first read."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aftexport' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    needs_torch = () if find_spec("torch") else ("load", "save")  # help() reads each name
    return sorted({*globals(), *__all__} - {*needs_torch})
