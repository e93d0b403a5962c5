"""Triangles of boolean masks, computed on integers: ONNX Runtime 1.17 has no boolean kernel."""

import onnx
from onnx import TensorProto


def widen_boolean_triangles(model: onnx.ModelProto) -> None:
    """Rewrite each Trilu of booleans in the main graph, in place.

    Args:
        model: the graph, with the types of intermediate values in its ``value_info``.
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
