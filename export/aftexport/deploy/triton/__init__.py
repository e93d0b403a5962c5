"""A model repository of Triton Inference Server from a bundle."""

from aftexport.deploy.triton.repository import MOUNTED, check_place, start_command, write_repository

__all__ = ["MOUNTED", "check_place", "start_command", "write_repository"]
