"""Servers to compare ``aftserve`` with: separate programs that run the PyTorch model."""
