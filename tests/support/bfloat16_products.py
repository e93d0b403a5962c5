"""Products of bfloat16 on a CPU, for which ONNX Runtime has no kernel."""

import onnx
import onnx.inliner

from aftexport.operators.domain import DOMAIN

_FLOAT, _BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16


def with_float32_sums(model: onnx.ModelProto, *bodies: str) -> onnx.ModelProto:
    """Return a model with float32 products of rounded operands, whose results are rounded too.

    A GPU's product of bfloat16 also sums exact products in float32 and rounds the sum.

    Args:
        model: a model whose products of bfloat16 have two operands that were just cast.
        bodies: the names of the functions with such products.
    """
    inlined = onnx.inliner.inline_selected_functions(model, [(DOMAIN, name) for name in bodies])
    casts = {
        node.output[0]
        for node in inlined.graph.node
        if node.op_type == "Cast" and node.attribute[0].i == _BFLOAT16
    }
    nodes: list[onnx.NodeProto] = []
    for node in inlined.graph.node:
        if node.op_type != "MatMul" or not casts.issuperset(node.input):
            nodes.append(node)
            continue
        result = node.output[0]
        wide = [f"{name}_of_{result}" for name in node.input]
        for name, operand in zip(node.input, wide, strict=True):
            nodes.append(onnx.helper.make_node("Cast", [name], [operand], to=_FLOAT))
        nodes.append(onnx.helper.make_node("MatMul", wide, [f"{result}_sum"]))
        nodes.append(onnx.helper.make_node("Cast", [f"{result}_sum"], [result], to=_BFLOAT16))
    del inlined.graph.node[:]
    inlined.graph.node.extend(nodes)
    return inlined
