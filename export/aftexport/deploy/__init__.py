"""Engines for one machine: building them, choosing one, exporting them, Triton repositories."""
