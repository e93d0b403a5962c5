"""Parity as tables, JSON and an HTML page."""
