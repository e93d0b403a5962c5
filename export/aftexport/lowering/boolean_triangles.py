"""Triangles of boolean masks, computed on integers: ONNX Runtime 1.17 has no boolean kernel."""

import onnx_ir as ir

from aftexport.lowering.new_nodes import NewNodes


def widen_boolean_triangles(graph: ir.Graph) -> None:
    """Rewrite each Trilu of booleans in a graph, in place.

    Args:
        graph: the main graph, with the types of intermediate values.
    """
    for node in tuple(graph):
        mask, *diagonal = node.inputs or (None,)
        if node.op_type != "Trilu" or mask is None or mask.dtype != ir.DataType.BOOL:
            continue
        new = NewNodes(graph, "triangle")
        wide = new.add("Cast", mask, to=ir.DataType.INT64)
        trilu = ir.Node(node.domain, node.op_type, [wide, *diagonal], node.attributes.values())
        new.replace(node, new.add("Cast", new.append(trilu)[0], to=ir.DataType.BOOL))
