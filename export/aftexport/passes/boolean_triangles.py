"""Triangles of boolean masks, which ONNX Runtime 1.17 has no kernel for, as those of integers."""

import onnx
from onnx import TensorProto


def widen_boolean_triangles(model: onnx.ModelProto) -> None:
    """Rewrites, in place, each Trilu of booleans in the main graph.

    Args:
        model: with the types of what is between in its ``value_info``.
    """
    graph = model.graph
    described = (*graph.input, *graph.value_info)
    booleans = {v.name for v in described if v.type.tensor_type.elem_type == TensorProto.BOOL}
    booleans |= {t.name for t in graph.initializer if t.data_type == TensorProto.BOOL}
    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        if node.op_type != "Trilu" or node.input[0] not in booleans:
            nodes.append(node)
            continue
        mask, result = node.input[0], node.output[0]
        wide, triangle = f"val_wide_{result}", f"val_triangle_{result}"
        node.input[0], node.output[0] = wide, triangle
        nodes += [
            onnx.helper.make_node("Cast", [mask], [wide], to=TensorProto.INT64),
            node,
            onnx.helper.make_node("Cast", [triangle], [result], to=TensorProto.BOOL),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
