"""Graphs for TensorRT, prepared with onnx-graphsurgeon."""
