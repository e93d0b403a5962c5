"""ONNX export and deployment of linear-attention models.

``import aftexport`` does not import torch: a server needs no more than a bundle.
"""

import os
from typing import TYPE_CHECKING, Any

from aftexport._version import __version__

if TYPE_CHECKING:
    from aftexport.checkpoint import load, save
    from aftexport.pipeline.export import export

__all__ = ["__version__", "export", "load", "save"]

# ONNX Runtime's wheels report usage, and keep an identifier in the home folder, as soon as they are
# imported; a tool that handles people's documents must not.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def __getattr__(name: str) -> Any:
    if name in ("load", "save"):
        from aftexport import checkpoint

        return getattr(checkpoint, name)
    if name == "export":
        from aftexport.pipeline.export import export

        return export
    raise AttributeError(f"module 'aftexport' has no attribute {name!r}")
