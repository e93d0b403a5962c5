"""What one would write instead of ``aftserve``: programs of their own, over the PyTorch model."""
