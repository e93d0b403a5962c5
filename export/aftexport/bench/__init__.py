"""Measures a bundle on this machine: ``aftexport bench``."""
