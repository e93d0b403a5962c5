"""What a ``model.pt`` may be, and reading it without running what is in it."""

from aftexport.checkpoint.checkpoint import Checkpoint, from_factory, load, save

__all__ = ["Checkpoint", "from_factory", "load", "save"]
