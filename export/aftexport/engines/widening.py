"""A bfloat16 graph for a runtime without bfloat16 products: the same graph in float32.

Every bfloat16 number is a float32 number, so the weights are the same; the activations
keep more digits than they would have on a GPU.
"""

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import TensorProto


def has_bfloat16(model: onnx.ModelProto) -> bool:
    """Tells whether a weight, an input or an output is bfloat16."""
    graph = model.graph
    values = (*graph.input, *graph.output)
    return any(t.data_type == TensorProto.BFLOAT16 for t in graph.initializer) or any(
        v.type.tensor_type.elem_type == TensorProto.BFLOAT16 for v in values
    )


def widen(model: onnx.ModelProto) -> None:
    """Rewrites every bfloat16 in ``model``, its weights loaded, to float32."""
    _widen_graph(model.graph)
    for function in model.functions:
        _widen_nodes(function.node)


def _widen_graph(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
            if attribute.HasField("t"):
                _widen_tensor(attribute.t)
            if attribute.HasField("g"):
                _widen_graph(attribute.g)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.BFLOAT16:
        wide = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))
