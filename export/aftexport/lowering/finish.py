"""The passes over a lowered graph, in their order."""

import onnx
import onnx_ir as ir

from aftexport.lowering.boolean_triangles import widen_boolean_triangles
from aftexport.lowering.fuse_encoder import fuse_encoder
from aftexport.lowering.fuse_fastformer import fuse_fastformer
from aftexport.lowering.fuse_pooling import fuse_pooling
from aftexport.lowering.optimizer_faults import avoid_optimizer_faults
from aftexport.lowering.position_bias import choose_precisions
from aftexport.lowering.small_sigmoids import keep_small_sigmoids
from aftexport.operators.portable_bodies import attach_bodies


def finish(
    lowered: onnx.ModelProto, *, precision: str = "fp32", fuse: bool = True
) -> onnx.ModelProto:
    """Fuse the layers around the attention, and attach portable bodies to all custom nodes.

    Args:
        lowered: the graph of ``lowering.to_onnx.lower``, which stays unchanged.
        precision: fp16 for a float16 program; bf16 or int8 for the products inside kernels.
        fuse: whether to replace the layers around the attention by operators, and sums over the
            tokens by products. TensorRT fuses these itself, and the portable bodies would make it
            multiply in float32.
    """
    graph = ir.from_proto(lowered)
    if fuse:
        products = "fp32" if precision == "fp16" else precision
        fuse_fastformer(graph, precision=products)
        fuse_encoder(graph, precision=products)
        fuse_pooling(graph)
    widen_boolean_triangles(graph.graph)
    keep_small_sigmoids(graph.graph)
    avoid_optimizer_faults(graph)
    model = ir.to_proto(graph)
    # Every runtime infers intermediate shapes itself; those of torch contain its own symbols.
    del model.graph.value_info[:]
    choose_precisions(model, precision)
    return attach_bodies(model)
