"""TensorRT: runtimes, builder, engine files and their cache."""
