"""Analyses and rewrites of a lowered ONNX graph."""
