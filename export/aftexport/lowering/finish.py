"""The passes over a lowered graph, in their order."""

import numpy as np
import onnx
import onnx_ir as ir

from aftexport.lowering.fuse_encoder import fuse_encoder, fuse_fastformer
from aftexport.lowering.fuse_pooling import fuse_pooling
from aftexport.lowering.nodes import NewNodes
from aftexport.lowering.optimizer_faults import avoid_optimizer_faults
from aftexport.lowering.position_bias import choose_precisions
from aftexport.operators.portable_bodies import attach_bodies


def finish(
    lowered: onnx.ModelProto, *, precision: str = "fp32", fuse: bool = True
) -> onnx.ModelProto:
    """Fuse the layers around the attention, and attach portable bodies to all custom nodes.

    The precision is fp16 for a float16 program, and bf16 or int8 for the products inside kernels.
    Without ``fuse``, layers around the attention and sums over the tokens stay: TensorRT fuses
    them itself, and the portable bodies would make it multiply in float32.
    """
    graph = ir.from_proto(lowered)
    if fuse:
        products = "fp32" if precision == "fp16" else precision
        fuse_fastformer(graph, precision=products)
        fuse_encoder(graph, precision=products)
        fuse_pooling(graph)
    widen_boolean_triangles(graph.graph)
    _keep_small_sigmoids(graph.graph)
    avoid_optimizer_faults(graph)
    model = ir.to_proto(graph)
    # Every runtime infers intermediate shapes itself; those of torch contain its own symbols.
    del model.graph.value_info[:]
    choose_precisions(model, precision)
    return attach_bodies(model)


def widen_boolean_triangles(graph: ir.Graph) -> None:
    """Rewrite each Trilu of booleans to integers: ONNX Runtime 1.17 has no boolean kernel."""
    for node in tuple(graph):
        mask, *diagonal = node.inputs or (None,)
        if node.op_type != "Trilu" or mask is None or mask.dtype != ir.DataType.BOOL:
            continue
        new = NewNodes(graph, "triangle")
        wide = new.add("Cast", mask, to=ir.DataType.INT64)
        trilu = ir.Node(node.domain, node.op_type, [wide, *diagonal], node.attributes.values())
        new.replace(node, new.add("Cast", new.append(trilu)[0], to=ir.DataType.BOOL))


# ONNX Runtime's Sigmoid has an error of 6e-8 and is 0 for inputs below -18. This does not matter in
# a gate. It does matter in log(sigmoid(x)) and sigmoid(x) ** (1 / 16), which gated linear attention
# uses, and in a weight that is divided by the sum of the weights.
_PRODUCTS = frozenset(("Einsum", "Gemm", "MatMul"))
_PASSED = _PRODUCTS | frozenset((
    "Abs", "Add", "Cast", "Clip", "Concat", "CumSum", "Div", "Expand", "Flatten", "Gather",
    "Identity", "Max", "Min", "Mul", "Neg", "Pad", "ReduceL1", "ReduceL2", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceSum", "Relu", "Reshape", "Slice", "Split", "Squeeze", "Sub",
    "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
"""Operators that map small numbers to small numbers."""
_SENSITIVE = frozenset(("Log", "Pow", "Reciprocal", "ReduceLogSum", "ReduceProd", "Sqrt"))


def _keep_small_sigmoids(graph: ir.Graph) -> None:
    """Rewrite each Sigmoid of the main graph that a logarithm, power or divisor reads, in place.

    The logarithm of a Sigmoid becomes a Softplus, which does not underflow.
    """
    sigmoids = [node for node in graph if node.op_type == "Sigmoid"]
    changed = [node for node in sigmoids if _is_sensitive(node.outputs[0])]
    for sigmoid in changed:
        for reader in dict.fromkeys(use.node for use in sigmoid.outputs[0].uses()):
            if reader.op_type == "Log" and reader.graph is graph:
                _write_softplus(graph, reader, sigmoid.inputs[0])
        _write_reciprocal(graph, sigmoid)


def _write_softplus(graph: ir.Graph, log: ir.Node, x: ir.Value | None) -> None:
    new = NewNodes(graph, "small_sigmoid")
    new.replace(log, new.add("Neg", new.add("Softplus", new.add("Neg", x))))


def _write_reciprocal(graph: ir.Graph, sigmoid: ir.Node) -> None:
    x = sigmoid.inputs[0]
    new = NewNodes(graph, "small_sigmoid")
    # The type of x may be unknown here.
    one = new.add("CastLike", new.constant(np.ones((), np.float32)), x)
    divisor = new.add("Add", new.add("Exp", new.add("Neg", x)), one)
    new.replace(sigmoid, new.add("Reciprocal", divisor))


def _is_sensitive(value: ir.Value) -> bool:
    """Return whether a small number in ``value`` reaches a node that amplifies it."""
    seen, left = {value}, [value]
    while left:
        for node, place in left.pop().uses():
            if (node.op_type in _SENSITIVE and not place) or (node.op_type == "Div" and place):
                return True
            if node.op_type in _PASSED and not _is_layer(node):
                left += [output for output in node.outputs if output not in seen]
                seen.update(node.outputs)
    return False


def _is_layer(node: ir.Node) -> bool:
    """Return whether ``node`` multiplies by constants of both signs.

    A gate before such a layer keeps its Sigmoid. Constants of one sign, such as ones, only sum.
    """
    factors = node.inputs[:2] if node.op_type in _PRODUCTS else ()
    return any(value is not None and _has_both_signs(value) for value in factors)


def _has_both_signs(value: ir.Value) -> bool:
    if value.const_value is None:
        return False
    numbers = value.const_value.numpy()
    return bool((numbers < 0).any() and (numbers > 0).any())
