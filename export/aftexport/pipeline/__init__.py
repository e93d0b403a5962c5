"""The steps from a model file to a bundle."""
