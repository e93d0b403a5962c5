"""The web page at ``/``."""
