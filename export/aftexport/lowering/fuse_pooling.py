"""Replacement of sums over the tokens of an exported graph by sums of block sums.

    ReduceSum(X, t), ReduceMean(X, t)    ->  sum over blocks (sum within a block), / T
    ReduceL1(X, t)                       ->  such a sum of absolute values
    ReduceL2(X, t)                       ->  the root of such a sum of squares
    ReduceLogSumExp(X, t)                ->  of blocks (of a block's tokens)
    X - ReduceMean(X, t)                 ->  X - (such a mean M + the mean of X - M)
    CumSum(X, t)                         ->  within a block + of the blocks before
    ReduceSum(Mul(W, X), 1)              ->  sum over blocks (W^T X of a block)
    MatMul, Einsum of A, B over tokens   ->  sum over blocks (A B of a block)
    Softmax(X, t)                        ->  Softmax(X, t) / sum of it

ONNX Runtime may add float32 numbers one by one; the sum of a million equal tokens is then off by
1e-2. A mean that is subtracted from its own tokens is refined, because its error is large compared
with small deviations. Only values linear in the tokens are rewritten: their axis t is the only
dynamic axis besides the documents.
"""

import math
import re

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from aftexport.lowering import nodes as match
from aftexport.operators.domain import MAX_BLOCK


class _TokenBlocks:
    """A tape of new nodes, whose constants are added to a graph."""

    def __init__(self, model: ir.Model, name: str) -> None:
        self._model = model
        self._name = name
        self._constants: dict[tuple[int, ...], ir.Value] = {}
        self.tape = Tape()

    def ints(self, *values: int) -> ir.Value:
        """Return a constant int64 vector."""
        if values not in self._constants:
            name = f"{self._name}_ints_{len(self._constants)}"
            array = np.array(values, np.int64)
            self._constants[values] = match.add_constant(self._model, name, array)
        return self._constants[values]

    def scalar(self, value: int) -> ir.Value:
        """Return a constant int64 scalar."""
        return self.tape.op("Squeeze", [self.ints(value)])

    def split(self, x: ir.Value, axis: int, gap: float = 0.0) -> ir.Value:
        """Reshape ``[..., T, ...]`` to ``[..., blocks, size, ...]``, padded at the end."""
        op = self.tape.op
        one = self.ints(1)
        tokens = op("Shape", [x], {"start": axis, "end": axis + 1})
        tokens_up = op("Add", [tokens, self.ints(MAX_BLOCK - 1)])
        blocks = op("Max", [op("Div", [tokens_up, self.ints(MAX_BLOCK)]), one])
        blocks_up = op("Sub", [op("Add", [tokens, blocks]), one])
        size = op("Max", [op("Div", [blocks_up, blocks]), one])
        missing = op("Sub", [op("Mul", [blocks, size]), tokens])
        before = [op("Shape", [x], {"start": 0, "end": axis})] if axis else []
        assert x.shape is not None
        after = [op("Shape", [x], {"start": axis + 1})] if axis + 1 < len(x.shape) else []
        gap_shape = op("Concat", [*before, missing, *after], {"axis": 0})
        number = ir.tensor(np.array([gap], np.float32))
        filled = op("ConstantOfShape", [gap_shape], {"value": number})
        whole = op("Concat", [x, filled], {"axis": axis})
        shape = op("Concat", [*before, blocks, size, *after], {"axis": 0})
        return op("Reshape", [whole, shape])

    def total(self, blocks: ir.Value, axis: int, addition: str = "ReduceSum") -> ir.Value:
        """Sum the result of ``split`` over the blocks' tokens, then over the blocks.

        The axis of the blocks stays with size 1.
        """
        op = self.tape.op
        of_blocks = op(addition, [blocks, self.ints(axis + 1)], {"keepdims": 0})
        return op(addition, [of_blocks, self.ints(axis)], {"keepdims": 1})

    def running_total(self, blocks: ir.Value, axis: int) -> ir.Value:
        """Return the running sum of a result of ``split``, in the same shape."""
        op = self.tape.op
        within = op("CumSum", [blocks, self.scalar(axis + 1)])
        totals = op("ReduceSum", [blocks, self.ints(axis + 1)], {"keepdims": 1})
        before = op("CumSum", [totals, self.scalar(axis)], {"exclusive": 1})
        return op("Add", [within, before])

    def join(self, blocks: ir.Value, axis: int, x: ir.Value) -> ir.Value:
        """Reshape ``blocks`` to the shape of ``x`` before ``split``, without the padding."""
        op = self.tape.op
        before = [op("Shape", [x], {"start": 0, "end": axis})] if axis else []
        assert x.shape is not None
        after = [op("Shape", [x], {"start": axis + 1})] if axis + 1 < len(x.shape) else []
        shape = op("Concat", [*before, self.ints(-1), *after], {"axis": 0})
        tokens = op("Shape", [x], {"start": axis, "end": axis + 1})
        joined = op("Reshape", [blocks, shape])
        return op("Slice", [joined, self.ints(0), tokens, self.ints(axis)])


_LOGS = "ReduceLogSumExp"
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", _LOGS)


def fuse_pooling(model: ir.Model) -> None:
    """Rewrite ``model`` in place."""
    for node in list(model.graph):
        if node.domain != "":
            continue
        if node.op_type in _REDUCTIONS:
            _sum(model, node)
        elif node.op_type in _REWRITES:
            _REWRITES[node.op_type](model, node)
    RemoveUnusedNodesPass()(model)


def _token_axis(model: ir.Model, x: ir.Value | None) -> int | None:
    """Return the only dynamic axis of ``x`` besides the documents; None without exactly one."""
    if x is None or x.shape is None or x.dtype != ir.DataType.FLOAT:
        return None
    shapes = [value.shape for value in model.graph.inputs]
    documents = {str(shape[0]) for shape in shapes if shape is not None and len(shape)}
    # Heads may be folded into the documents' axis, such as 4*batch.
    folded = re.compile(rf"(\d+\*)?({'|'.join(map(re.escape, documents))})")
    sizes = [None if isinstance(dim, int) else str(dim.value) for dim in x.shape]
    long = [i for i, size in enumerate(sizes) if size is not None and not folded.fullmatch(size)]
    return long[0] if len(long) == 1 else None


def _sum(model: ir.Model, reduction: ir.Node) -> None:
    summed = reduction.inputs[0]
    axis = _token_axis(model, summed)
    if summed is None or summed.shape is None or axis is None:
        return
    axes = _axes(reduction, len(summed.shape))
    sizes = {other: summed.shape[other] for other in axes if other != axis}
    widths = {other: size for other, size in sizes.items() if isinstance(size, int)}
    if axis not in axes or len(widths) < len(sizes):
        return
    new = _TokenBlocks(model, f"{reduction.outputs[0].name}")
    op, op_type = new.tape.op, reduction.op_type
    is_center = op_type == "ReduceMean" and _is_center(reduction)
    is_plain = op_type in ("ReduceSum", "ReduceMean") and not widths and not is_center
    weighted = _weighted(summed) if axis == 1 and is_plain else None
    if weighted is None:
        total = _total(op_type, summed, axis, [*widths], new)
    else:
        weights, x = (new.split(value, 1) for value in weighted)
        rows = op("Transpose", [weights], {"perm": [0, 1, 3, 2]})
        # The axis of the rows stays, with one row per block.
        total = op("ReduceSum", [op("MatMul", [rows, x]), new.ints(1)], {"keepdims": 0})
    if op_type == "ReduceL2":
        total = op("Sqrt", [total])
    if op_type == "ReduceMean":
        total = _mean(summed, total, axis, widths, new, is_refined=is_center)
    if not reduction.attributes.get_int("keepdims", 1):
        total = op("Squeeze", [total, new.ints(*sorted(axes))])
    _replace(model, reduction, new, total)


def _mean(
    summed: ir.Value,
    total: ir.Value,
    axis: int,
    widths: dict[int, int],
    new: _TokenBlocks,
    *,
    is_refined: bool,
) -> ir.Value:
    """Return ``total`` divided by its number of terms, refined by the mean of the deviations."""
    op = new.tape.op
    count = op("Shape", [summed], {"start": axis, "end": axis + 1})
    if widths:
        count = op("Mul", [count, new.ints(math.prod(widths.values()))])
    count = op("Cast", [count], {"to": int(ir.DataType.FLOAT)})
    mean = op("Div", [total, count])
    if not is_refined:
        return mean
    rest = op("Sub", [summed, mean])
    rest.type, rest.shape = summed.type, summed.shape
    more = op("Div", [_total("ReduceSum", rest, axis, [*widths], new), count])
    # Deviations from an infinite mean are NaN; their mean is not added.
    return op("Where", [op("IsNaN", [more]), mean, op("Add", [mean, more])])


def _is_center(mean: ir.Node) -> bool:
    """Return whether a node subtracts the mean from its own terms, or its terms from the mean."""
    values = [mean.outputs[0]]
    users = [user for user, _ in values[0].uses()]
    values += [user.outputs[0] for user in users if user.op_type in ("Unsqueeze", "Expand")]
    return any(
        user.op_type == "Sub" and mean.inputs[0] in user.inputs
        for value in values
        for user, _ in value.uses()
    )


def _total(
    op_type: str, summed: ir.Value, axis: int, others: list[int], new: _TokenBlocks
) -> ir.Value:
    """Return the sum of a reduction's terms over tokens and other axes, which stay with size 1."""
    op, terms = new.tape.op, summed
    addition, gap = (_LOGS, -math.inf) if op_type == _LOGS else ("ReduceSum", 0.0)
    if op_type == "ReduceL1":
        terms = op("Abs", [summed])
    if op_type == "ReduceL2":
        terms = op("Mul", [summed, summed])
    if others:
        terms = op(addition, [terms, new.ints(*others)], {"keepdims": 1})
    assert summed.shape is not None
    shape = ir.Shape([1 if i in others else dim for i, dim in enumerate(summed.shape)])
    terms.type, terms.shape = summed.type, shape
    return new.total(new.split(terms, axis, gap), axis, addition)


def _axes(reduction: ir.Node, rank: int) -> list[int]:
    """Return the axes of a reduction, counted from the first; none if they are not constant."""
    axes = (*reduction.inputs, None)[1]
    if axes is None or axes.const_value is None:
        return []
    return [axis % rank for axis in match.constant(axes).tolist()]


def _weighted(summed: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return token weights ``[B, T, 1]`` and the weighted ``[B, T, D]``; None for other values."""
    product = summed.producer()
    if product is None or product.op_type != "Mul":
        return None
    for weights, x in (product.inputs, reversed(product.inputs)):
        if weights is None or weights.shape is None or x is None or x.shape is None:
            continue
        is_3d = len(weights.shape) == len(x.shape) == 3
        is_per_token = is_3d and weights.shape[:2] == x.shape[:2]
        if is_per_token and weights.shape[2] == 1 and isinstance(x.shape[2], int):
            return weights, x
    return None


def _multiply(model: ir.Model, product: ir.Node) -> None:
    left, right = product.inputs
    axes = _token_axis(model, left), _token_axis(model, right)
    if left is None or left.shape is None or right is None or right.shape is None:
        return
    rank = len(left.shape)
    if rank < 2 or len(right.shape) != rank or axes != (rank - 1, rank - 2):
        return
    new = _TokenBlocks(model, f"{product.outputs[0].name}")
    op = new.tape.op
    columns = new.split(left, rank - 1)
    order = [*range(rank - 2), rank - 1, rank - 2, rank]
    rows = op("Transpose", [columns], {"perm": order})
    of_blocks = op("MatMul", [rows, new.split(right, rank - 2)])
    total = op("ReduceSum", [of_blocks, new.ints(rank - 2)], {"keepdims": 0})
    _replace(model, product, new, total)


def _contract(model: ir.Model, einsum: ir.Node) -> None:
    """Split the tokens' letter into two, for blocks and within blocks, and sum the blocks."""
    equation = einsum.attributes.get_string("equation", "").replace(" ", "")
    terms, arrow, result = equation.partition("->")
    letters = terms.split(",")
    operands = [(x, _token_axis(model, x)) for x in einsum.inputs]
    token_axes = [(x, axis) for x, axis in operands if x is not None and axis is not None]
    if not arrow or "." in terms or "X" in terms or len(token_axes) < len(operands):
        return
    token, *others = {term[axis] for term, (_, axis) in zip(letters, token_axes, strict=True)}
    if others or token in result:
        return
    new = _TokenBlocks(model, f"{einsum.outputs[0].name}")
    split = [new.split(x, axis) for x, axis in token_axes]
    cut = ",".join(term.replace(token, f"X{token}") for term in letters)
    of_blocks = new.tape.op("Einsum", split, {"equation": f"{cut}->X{result}"})
    total = new.tape.op("ReduceSum", [of_blocks, new.ints(0)], {"keepdims": 0})
    _replace(model, einsum, new, total)


def _run(model: ir.Model, running: ir.Node) -> None:
    x, place = running.inputs
    axis = _token_axis(model, x)
    if x is None or x.shape is None or axis is None or place is None or place.const_value is None:
        return
    if running.attributes.get_int("exclusive", 0) or running.attributes.get_int("reverse", 0):
        return
    if match.constant(place).item() not in (axis, axis - len(x.shape)):
        return
    new = _TokenBlocks(model, f"{running.outputs[0].name}")
    total = new.running_total(new.split(x, axis), axis)
    _replace(model, running, new, new.join(total, axis, x))


def _normalize(model: ir.Model, softmax: ir.Node) -> None:
    x, result = softmax.inputs[0], softmax.outputs[0]
    axis = _token_axis(model, x)
    if x is None or x.shape is None or axis is None:
        return
    if softmax.attributes.get_int("axis", -1) not in (axis, axis - len(x.shape)):
        return
    new = _TokenBlocks(model, f"{result.name}")
    weights = new.tape.op("Softmax", [x], {"axis": axis})
    weights.type, weights.shape = x.type, x.shape
    total = new.total(new.split(weights, axis), axis)
    _replace(model, softmax, new, new.tape.op("Div", [weights, total]))


def _replace(model: ir.Model, node: ir.Node, new: _TokenBlocks, result: ir.Value) -> None:
    model.graph.insert_after(node, new.tape.nodes)
    match.take_place(node.outputs[0], result)


_REWRITES = {"MatMul": _multiply, "Einsum": _contract, "CumSum": _run, "Softmax": _normalize}
