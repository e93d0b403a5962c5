"""The export of a bundle to a model repository of Triton Inference Server."""

from aftexport.deploy.triton.repository import MOUNTED, check_place, start_command, write_repository

__all__ = ["MOUNTED", "check_place", "start_command", "write_repository"]
