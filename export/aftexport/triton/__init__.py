"""A model repository of Triton Inference Server from a bundle."""

from aftexport.triton.repository import check_place, start_command, write_repository

__all__ = ["check_place", "start_command", "write_repository"]
