"""The models of the server: what they share, the service of each, and the models by name."""
