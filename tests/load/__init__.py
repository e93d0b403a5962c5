"""Load tests of the server on loopback: ``make load`` and ``make soak``."""
