"""The rewrites of a loaded model for the CUDA execution provider, in their order."""

import onnx

from aftexport.engines.onnxruntime.encoder_products import narrow_products

_REWRITES = (narrow_products,)
"""Each changes a model in place, and returns whether it did."""


def rewrite_for_cuda(model: onnx.ModelProto) -> bool:
    """Rewrite a model in place; return whether it changed. External weights stay in their files."""
    changes = [rewrite(model) for rewrite in _REWRITES]
    return any(changes)
