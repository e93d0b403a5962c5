"""The benchmark of a bundle on this machine: ``aftexport bench``."""
