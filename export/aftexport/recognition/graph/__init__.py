"""The ONNX graph before its values are read: normalized, cleaned and probed for shapes."""
