"""The comparison of a bundle with PyTorch: ``aftexport verify``."""
