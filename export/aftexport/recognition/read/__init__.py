"""Values of an ONNX graph as formulas: the reader, and the formula of each operator."""
