"""Tests of the mechanisms: definitions, torch ops, portable ONNX bodies."""
