"""ONNX export and deployment of linear-attention models.

``import aftexport`` does not import torch: a server needs only a bundle.
"""

import os
from typing import TYPE_CHECKING, Any

from aftexport._version import __version__
from aftexport.options import EngineOptions, ExportOptions, ModelSource

if TYPE_CHECKING:
    from aftexport.checkpoint import load, save
    from aftexport.chunked.incremental_model import IncrementalModel
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


def __getattr__(name: str) -> Any:
    if name in ("load", "save"):
        from aftexport import checkpoint

        return getattr(checkpoint, name)
    if name == "export":
        from aftexport.pipeline.export import export

        return export
    if name == "IncrementalModel":
        from aftexport.chunked.incremental_model import IncrementalModel

        return IncrementalModel
    raise AttributeError(f"module 'aftexport' has no attribute {name!r}")
