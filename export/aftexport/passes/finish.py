"""The passes over a lowered graph, in their order."""

import onnx
import onnx_ir as ir

from aftexport.operators.portable_bodies import attach_bodies
from aftexport.passes.boolean_triangles import widen_boolean_triangles
from aftexport.passes.fuse_encoder import fuse_encoder
from aftexport.passes.fuse_fastformer import fuse_fastformer
from aftexport.passes.fuse_pooling import fuse_pooling
from aftexport.passes.optimizer_faults import avoid_optimizer_faults
from aftexport.passes.position_bias import choose_precisions
from aftexport.passes.small_sigmoids import keep_small_sigmoids


def finish(
    lowered: onnx.ModelProto, *, precision: str = "fp32", fuse: bool = True
) -> onnx.ModelProto:
    """Fuses what surrounds the attention, and gives every custom node its portable body.

    Args:
        lowered: the graph of ``lowering.to_onnx.lower``; not changed.
        precision: fp16 where the program is; bf16 or int8 for the products inside kernels.
        fuse: make operators of what surrounds the attention, and products of sums over the tokens.
            TensorRT fuses that itself, and their bodies would have it multiply in float32.
    """
    graph = ir.from_proto(lowered)
    if fuse:
        products = "fp32" if precision == "fp16" else precision
        fuse_fastformer(graph, precision=products)
        fuse_encoder(graph, precision=products)
        fuse_pooling(graph)
    model = ir.to_proto(graph)
    widen_boolean_triangles(model)
    keep_small_sigmoids(model)
    avoid_optimizer_faults(model)
    # Intermediate shapes are inferred again by every runtime; torch's carry its symbols.
    del model.graph.value_info[:]
    choose_precisions(model, precision)
    return attach_bodies(model)
