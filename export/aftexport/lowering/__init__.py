"""From an ExportedProgram to ONNX: torch.onnx, and the translations that it lacks."""
