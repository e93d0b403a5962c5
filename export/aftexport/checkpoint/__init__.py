"""Model files of several kinds, read without running the code in them."""

from aftexport.checkpoint.checkpoint import Checkpoint
from aftexport.checkpoint.classifier_file import save
from aftexport.checkpoint.model_file import load

__all__ = ["Checkpoint", "load", "save"]
