"""Inferred shapes of a graph with recurrent operators, which onnx itself cannot infer."""

from collections.abc import Iterator

import onnx
from onnx import helper

from aftexport.operators.domain import DOMAIN
from aftexport.operators.mechanisms.causal_depthwise_conv import CAUSAL_DEPTHWISE_CONV
from aftexport.operators.mechanisms.recurrent_linear_attention import RECURRENT_LINEAR_ATTENTION


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with inferred shapes of its values, by standard nodes of the same shapes."""
    stand_in = onnx.ModelProto()
    stand_in.CopyFrom(model)
    nodes = [new for node in model.graph.node for new in _with_known_shape(node)]
    del stand_in.graph.node[:]
    stand_in.graph.node.extend(nodes)
    inferred = onnx.shape_inference.infer_shapes(stand_in, data_prop=True)
    del inferred.graph.node[:]
    inferred.graph.node.extend(model.graph.node)
    return inferred


def _with_known_shape(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    if node.domain == DOMAIN and node.op_type == CAUSAL_DEPTHWISE_CONV.op_type:
        yield helper.make_node("Identity", node.input[:1], node.output[:1])
    elif node.domain == DOMAIN and node.op_type == RECURRENT_LINEAR_ATTENTION.op_type:
        heads = {a.name: a.i for a in node.attribute if a.name.endswith("_num_heads")}
        group = heads["q_num_heads"] // heads["kv_num_heads"]
        yield helper.make_node("Concat", [node.input[2]] * group, node.output[:1], axis=2)
    else:
        yield node
