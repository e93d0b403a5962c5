"""Makes sums over the tokens of an exported graph products of matrices.

    ReduceSum(X, 1)          ->  1 X          1 is [1, T]
    ReduceSum(Mul(W, X), 1)  ->  W^T X        W is [B, T, 1]
    ReduceMean(X, 1)         ->  1 X / T

and where T is not that of the inputs, zero for T = 0.

ONNX Runtime's reductions over any axis but the last add up row after row, on one thread, which is
both slower and less exact.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from aftexport.fuse import _matching as match

_REDUCTIONS = ("ReduceSum", "ReduceMean")


def fuse_pooling(model: ir.Model) -> None:
    """Rewrites ``model`` in place.

    Args:
        model: an exported graph whose values carry their types and shapes.
    """
    for node in list(model.graph):
        if node.domain == "" and node.op_type in _REDUCTIONS and _sums_tokens(node):
            _multiply(model, node)
    RemoveUnusedNodesPass()(model)


def _sums_tokens(node: ir.Node) -> bool:
    x, axes = (*node.inputs, None)[:2]
    if x is None or axes is None or axes.const_value is None or x.dtype != ir.DataType.FLOAT:
        return False
    return match.constant(axes).tolist() == [1] and _width(x) is not None


def _width(x: ir.Value | None) -> int | None:
    """D of ``[B, T, D]``, with any number of tokens."""
    if x is None or x.shape is None or len(x.shape) != 3 or isinstance(x.shape[1], int):
        return None
    return x.shape[2] if isinstance(x.shape[2], int) else None


def _is_of_input(model: ir.Model, x: ir.Value | None) -> bool:
    """Whether ``x [B, T, D]`` has the tokens of a document, of which there is one or more."""
    if x is None or x.shape is None:
        return False
    inputs = [value.shape for value in model.graph.inputs]
    return any(s is not None and len(s) == 2 and s[1] == x.shape[1] for s in inputs)


def _multiply(model: ir.Model, reduction: ir.Node) -> None:
    summed, axes = reduction.inputs
    new = Tape()
    tokens = new.op("Shape", [summed], {"start": 1, "end": 2})
    weighted = _weighted(summed)
    name = reduction.outputs[0].name
    if weighted is None:
        one = match.add_constant(model, f"{name}_one", np.ones(1, np.int64))
        shape = new.op("Concat", [one, tokens], {"axis": 0})
        value = ir.tensor(np.ones(1, np.float32))
        total = new.op("MatMul", [new.op("ConstantOfShape", [shape], {"value": value}), summed])
    else:
        weights, x = weighted
        total = new.op("MatMul", [new.op("Transpose", [weights], {"perm": [0, 2, 1]}), x])
    if not _is_of_input(model, summed):
        # Of no tokens, as x[:, 5:] can have, ONNX Runtime's product is zero in the first document
        # alone, and whatever lay in memory in the others.
        none = match.add_constant(model, f"{name}_none", np.zeros(1, np.int64))
        zero = match.add_constant(model, f"{name}_zero", np.zeros(1, np.float32))
        total = new.op("Where", [new.op("Equal", [tokens, none]), zero, total])
    if reduction.op_type == "ReduceMean":
        count = new.op("Cast", [tokens], {"to": int(ir.DataType.FLOAT)})
        total = new.op("Div", [total, count])
    if not reduction.attributes.get_int("keepdims", 1):
        total = new.op("Squeeze", [total, axes])
    model.graph.insert_after(reduction, new.nodes)
    match.take_place(reduction.outputs[0], total)


def _weighted(summed: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None] | None:
    """A weight for each token, and what it weighs."""
    product = summed.producer() if summed is not None else None
    if product is None or product.op_type != "Mul":
        return None
    for weights, x in (product.inputs, reversed(product.inputs)):
        if _width(weights) == 1 and _width(x) is not None:
            return weights, x
    return None
