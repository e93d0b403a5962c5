"""The types in which a model is captured, for each ``--precision``."""

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
"""Precision to the type of weights and activations for TensorRT, which reads it in the graph."""
