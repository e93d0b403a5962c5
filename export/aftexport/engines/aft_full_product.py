"""Replacement of AFT-full in a graph by a matrix product of the runtime's own library.

    weights  = exp(position_bias - its row maxima), cut to the tokens of the document
    entries  = AftFullPrepare(key, value, lengths)
    products = MatMul(weights, entries)
    output   = AftFullFinish(query, key, value, position_bias, products, lengths)

ONNX Runtime and TensorRT compute the weights once, as all nodes before the cut are constant:
ONNX Runtime when it loads the model, TensorRT when it builds the engine. So the weights need no
place in the file, whose size is limited, and one implementation serves both engines. Newer
versions of ONNX Runtime leave outputs over 1 GiB to each run by default, which are those above
16,384 tokens in float32; ``onnxruntime.sessions`` removes this limit.
"""

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper

from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.operators.portable_bodies import attach_bodies, takes_form

_NARROW: set[tuple[int, str]] = {
    (TensorProto.FLOAT16, "fp16"),
    (TensorProto.BFLOAT16, "bf16"),
    (TensorProto.BFLOAT16, "int8"),
}
"""Element type and attribute ``precision`` of the nodes that may be replaced. Others are wider.
``lowering.position_bias`` sets the attribute, so that the range of the bias suits the precision."""


MIN_TOKENS = 2048
"""The number of tokens from which on the library's product is chosen; an estimate, not measured.

The product runs nearer to the peak of the GPU, but its entries pass through memory, so it pays for
long documents only. It is also ``AFT_CUDA_AFT_FULL_GEMM_TOKENS`` of the kernels. float32 keeps the
fused kernel at any length: a library adds all keys to one float32 sum, whose error grows with the
tokens. The fused kernel adds segments of keys, whose error does not.
"""


def use_products(model: onnx.ModelProto, library: str, *, max_tokens: int | None = None) -> bool:
    """Replace the AFT-full nodes that a library's product computes faster.

    Args:
        model: the graph, which is changed in place.
        library: the name of the kernel library, see ``aftplugins.RUNTIMES``.
        max_tokens: the number of tokens of the longest document; None for as many as the bias has
            rows.

    Returns:
        Whether there were any.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        bias = _constant_bias(node, library, constants)
        if bias is not None and _is_chosen(node, bias, max_tokens):
            nodes += _product_nodes(node, bias.data_type)
        else:
            nodes.append(node)
    if len(nodes) == len(model.graph.node):
        return False
    changed = onnx.GraphProto(node=nodes)  # a copy: the old nodes are deleted
    del model.graph.node[:]
    model.graph.node.extend(changed.node)
    attach_bodies(model)
    return True


def _constant_bias(
    node: onnx.NodeProto, library: str, constants: Mapping[str, TensorProto]
) -> TensorProto | None:
    """Return the bias of an AFT-full node that the kernels take, or None."""
    is_aft_full = node.domain == DOMAIN and operator_name(node.op_type) == "AftFull"
    return constants.get(node.input[3]) if is_aft_full and takes_form(library, node) else None


def _is_chosen(node: onnx.NodeProto, bias: TensorProto, max_tokens: int | None) -> bool:
    asked = next((a.s.decode() for a in node.attribute if a.name == "precision"), "fp32")
    tokens = min(bias.dims[0], max_tokens or bias.dims[0])
    return (bias.data_type, asked) in _NARROW and tokens >= MIN_TOKENS


def _product_nodes(node: onnx.NodeProto, element: int) -> list[onnx.NodeProto]:
    query, key, value, bias, lengths = node.input
    (output,) = node.output
    nodes: list[onnx.NodeProto] = []

    def add(stem: str, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Add a node, and return the name of its output."""
        nodes.append(helper.make_node(op_type, inputs, [f"{output}/{stem}"], **attributes))
        return f"{output}/{stem}"

    # In float32: a difference of 16-bit numbers would be rounded once more.
    wide = add("wide_bias", "Cast", bias, to=TensorProto.FLOAT)
    axis = add("keys_axis", "Constant", value_ints=[1])
    row_max = add("bias_row_max", "ReduceMax", wide, axis, keepdims=1)
    shifted = add("shifted_bias", "Sub", wide, row_max)
    exponentials = add("bias_exponentials", "Exp", shifted)
    weights = add("bias_weights", "Cast", exponentials, to=element)
    tokens = add("tokens", "Shape", key, start=1, end=2)
    origin = add("origin", "Constant", value_ints=[0, 0])
    corner = add("corner", "Concat", tokens, tokens, axis=0)
    cut = add("cut_weights", "Slice", weights, origin, corner)
    entries = add("entries", "AftFullPrepare", key, value, lengths, domain=DOMAIN)
    products = add("products", "MatMul", cut, entries)
    gates = {a.name: a.s for a in node.attribute if a.name == "gate"}
    inputs = [query, key, value, bias, products, lengths]
    # The name of the replaced node: engines report the path of each node by its name.
    finish = helper.make_node("AftFullFinish", inputs, [output], node.name, domain=DOMAIN, **gates)
    for new in nodes:
        new.name = new.output[0]
    return [*nodes, finish]
