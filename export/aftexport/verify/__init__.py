"""Checks a bundle against PyTorch: ``aftexport verify``."""
