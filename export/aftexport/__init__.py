"""ONNX export and deployment of linear-attention models.

``import aftexport`` does not import torch: a server needs only a bundle.
"""

import os
from importlib import metadata
from typing import TYPE_CHECKING, Any

from aftexport._version import __version__

if TYPE_CHECKING:
    from aftexport.checkpoint import load, save
    from aftexport.chunked.incremental_model import IncrementalModel
    from aftexport.pipeline.export import export
    from aftserve.predictor import Predictor

__all__ = ["IncrementalModel", "Predictor", "__version__", "export", "load", "save"]

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
    if name == "Predictor":
        # It lies in aftserve, which this package does not import: an entry point registers it.
        entries = metadata.distribution("aftexport").entry_points
        (entry,) = entries.select(group="aftexport", name=name)
        return entry.load()
    raise AttributeError(f"module 'aftexport' has no attribute {name!r}")
