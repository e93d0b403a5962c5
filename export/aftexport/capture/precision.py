"""The types that a model is captured in, for each ``--precision``."""

import torch

PRECISIONS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.float32,
    "int8": torch.float32,
    "auto": torch.float32,
}
"""Precision to the type of weights and activations; bf16 and int8 round inside the products."""
ENGINE_PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The same for TensorRT, which takes its types from the graph."""
