"""Translation of an ExportedProgram to ONNX, with operators that torch.onnx does not translate."""
