"""Model files of several kinds, read without running the code in them."""

from aftexport.checkpoint.checkpoint import Checkpoint
from aftexport.checkpoint.classifier_file import save
from aftexport.checkpoint.model_file import from_factory, load

__all__ = ["Checkpoint", "from_factory", "load", "save"]
