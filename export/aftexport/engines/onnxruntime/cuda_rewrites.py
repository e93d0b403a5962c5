"""The rewrites of a loaded model for the CUDA execution provider, in their order."""

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from aftexport.engines.onnxruntime.encoder_products import narrow_products


def rewrite_for_cuda(model: onnx.ModelProto) -> bool:
    """Rewrite a model in place; return whether it changed. External weights stay in their files."""
    graph = ir.from_proto(model)
    if not narrow_products(graph):
        return False
    RemoveUnusedFunctionsPass()(graph)  # type: ignore[no-untyped-call]  # of onnx_ir
    model.CopyFrom(ir.to_proto(graph))
    return True
