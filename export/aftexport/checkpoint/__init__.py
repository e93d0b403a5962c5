"""Model files of several kinds, read without running the code in them."""

from aftexport.checkpoint.checkpoint import Checkpoint, from_factory, load, save

__all__ = ["Checkpoint", "from_factory", "load", "save"]
