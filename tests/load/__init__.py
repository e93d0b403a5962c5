"""The server under load, on loopback: ``make load`` and ``make soak``."""
