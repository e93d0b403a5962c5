"""Benchmarks of the core operators: ``make bench`` and ``make bench-quick``."""
