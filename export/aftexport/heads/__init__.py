"""The answers that a model may give."""
