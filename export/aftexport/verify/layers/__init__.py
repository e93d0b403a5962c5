"""Compares two runs tensor by tensor, and finds the step at fault."""
