"""The ONNX domain ai.aftexport: schemas, definitions, torch ops and portable ONNX bodies."""
