"""A model that also returns the evidence of each token, where it can."""

import onnx
import onnx_ir as ir

from aftexport.lowering.evidence import Explainable, add_evidence
from aftexport.lowering.summed_heads import NoEvidence


def explained_model(lowered: onnx.ModelProto, to: str) -> tuple[onnx.ModelProto, Explainable | str]:
    """Return a model that also returns evidence, and its kinds; or itself, with the reason."""
    if to != "onnx":
        return lowered, "TensorRT engines only output logits"
    explained = ir.from_proto(lowered)
    try:
        kinds = add_evidence(explained)
    except NoEvidence as reason:
        return lowered, str(reason)
    return ir.to_proto(explained), kinds
