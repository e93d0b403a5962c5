"""Metrics, tracing, logging and health."""
