"""Live comparison with the PyTorch model."""
