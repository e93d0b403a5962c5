"""Translations of attention, and of sums of logarithms, which scan blocks of long documents."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18 as op

from aftexport.operators.domain import MAX_BLOCK, SIDE_BY_SIDE
from aftexport.system.internals.torch_translation import call_op


class GraphBody:
    """A list of nodes that is filled by the same calls as an onnxscript opset."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        def apply(*inputs: ir.Value, **attributes: Any) -> ir.Value:
            self.nodes.append(ir.node(op_type, inputs, attributes))
            return self.nodes[-1].outputs[0]

        return apply


def constant(numbers: int | Sequence[int]) -> Any:
    """Return a number, or a tensor of one axis."""
    return op.Constant(value=ir.tensor(np.array(numbers, np.int64)))


def ints(*values: int) -> Any:
    """Return a tensor of one axis."""
    return constant(values)


# torch.onnx translates attention for tensors of four axes, and returns NaN for fully masked rows.
# torch returns zeros for them, and accepts every rank.
def scaled_dot_product_attention(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    attn_mask=None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
):
    """Translate attention of ``query [..., L, E]`` and ``key [..., S, E]`` for torch.onnx."""
    query, key, value = _operands(query, key, value, scale, enable_gqa)
    scores = op.MatMul(query, key)
    masked = op.CastLike(-math.inf, scores)
    if is_causal:
        scores = op.Where(_causal(query, value), scores, masked)
    elif attn_mask is not None and attn_mask.dtype == ir.DataType.BOOL:
        scores = op.Where(attn_mask, scores, masked)
    elif attn_mask is not None:
        scores = op.Add(scores, op.CastLike(attn_mask, scores))
    weights = op.Softmax(scores, axis=-1)
    if attn_mask is not None:
        is_empty = op.Equal(op.ReduceMax(scores, [-1], keepdims=1), masked)
        weights = op.Where(is_empty, op.CastLike(0.0, scores), weights)
    if dropout_p:
        weights = op.Dropout(weights, dropout_p)
    return op.MatMul(weights, value)


def _operands(
    query: Any, key: Any, value: Any, scale: float | None, enable_gqa: bool
) -> tuple[Any, Any, Any]:
    """Return the scaled query, the scaled and transposed key, and the value, all of one rank."""
    rank = len(key.shape)
    if enable_gqa:
        key, value = _repeated(key, query), _repeated(value, query)
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    # Scale both sides by the root, as torch does: the unscaled product may overflow float16.
    root = _root_of_scale(query, scale)
    return op.Mul(query, root), op.Mul(op.Transpose(key, perm=swapped), root), value


def _root_of_scale(query: Any, scale: float | None) -> Any:
    if scale is not None:
        return op.CastLike(math.sqrt(scale), query)
    width = query.shape[-1]
    if isinstance(width, int):
        return op.CastLike(width**-0.25, query)
    width = op.CastLike(op.Shape(query, start=-1), query)
    return op.Reciprocal(op.Sqrt(op.Sqrt(width)))


def _causal(query: Any, key: Any) -> Any:
    """Return a bool ``[L, S]``, true where the key is at or before the query."""
    first, step, axis = (constant(n) for n in (0, 1, [0]))
    rows = op.Range(first, op.Squeeze(op.Shape(query, start=-2, end=-1), axis), step)
    columns = op.Range(first, op.Squeeze(op.Shape(key, start=-2, end=-1), axis), step)
    return op.LessOrEqual(columns, op.Unsqueeze(rows, constant([1])))


def _repeated(heads: Any, query: Any) -> Any:
    """Return ``heads [..., H, S, E]``, each repeated once for every query head of its group."""
    count, wanted = op.Shape(heads, start=-3, end=-2), op.Shape(query, start=-3, end=-2)
    times = op.Div(wanted, count)
    before, after = op.Shape(heads, end=-3), op.Shape(heads, start=-2)
    each = op.Unsqueeze(heads, constant([-3]))
    shape = op.Concat(before, count, times, after, axis=0)
    return op.Reshape(op.Expand(each, shape), op.Concat(before, wanted, after, axis=0))


# log(cumsum(exp(x))) overflows for x of 89 and more; after subtraction of the overall maximum it
# loses the terms before the maximum. A scan keeps a sum of powers as its largest logarithm and the
# rest: the sum is exp(largest) * (1 + rest). Blocks are scanned in parallel, then their totals, and
# each block's sums are added to the total of the blocks before it.
_Sums = tuple[Any, Any]
"""The largest logarithms and the rests."""


def logcumsumexp(self, dim: int):  # type: ignore[no-untyped-def]
    """Translate the operator for torch.onnx: scans over ``dim``, in float32 or wider."""
    if not len(self.shape):
        return op.Identity(self)
    dim %= len(self.shape)
    element = ir.DataType.DOUBLE if self.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    wide = op.Cast(self, to=element)
    before = [op.Shape(self, start=0, end=dim)] if dim else []
    terms = op.Shape(self, start=dim, end=dim + 1)
    after = [op.Shape(self, start=dim + 1)] if dim + 1 < len(self.shape) else []
    blocks, size = _cut(terms)
    nothing = op.CastLike(-math.inf, wide)
    gap = op.Concat(*before, op.Sub(op.Mul(blocks, size), terms), *after, axis=0)
    whole = op.Concat(wide, op.Expand(nothing, gap), axis=dim)
    split = op.Reshape(whole, op.Concat(*before, blocks, size, *after, axis=0), allowzero=1)

    of_blocks = op.Concat(*before, blocks, *after, axis=0)
    totals, within = _scan(element, (split,), dim + 1, of_blocks)
    of_all = op.Concat(*before, *after, axis=0) if len(self.shape) > 1 else ints()
    _, others = _scan(element, totals, dim, of_all, exclusive=True)
    before_blocks = (op.Unsqueeze(part, ints(dim + 1)) for part in others)
    largest, rest = _add(op, op.CastLike(0.0, wide), *within, *before_blocks)
    if element is ir.DataType.FLOAT:
        more = op.Softplus(op.Log(rest))
    else:  # ONNX Runtime 1.31 has no Softplus of float64.
        more = op.Log(op.Add(rest, op.CastLike(1.0, wide)))
    sums = op.Add(largest, more)
    joined_shape = op.Concat(*before, op.Mul(blocks, size), *after, axis=0)
    joined = op.Reshape(sums, joined_shape, allowzero=1)
    return op.CastLike(op.Slice(joined, ints(0), terms, ints(dim)), self)


def _cut(terms: Any) -> tuple[Any, Any]:
    """Return the number of blocks and their size, as ``two_level_sums.cut_of`` does."""

    def quotient_up(count: Any, part: Any) -> Any:
        return op.Div(op.Sub(op.Add(count, part), ints(1)), part)

    some = op.Min(quotient_up(terms, ints(SIDE_BY_SIDE)), ints(SIDE_BY_SIDE))
    blocks = op.Max(quotient_up(terms, ints(MAX_BLOCK)), some, ints(1))
    return blocks, op.Max(quotient_up(terms, blocks), ints(1))


def _scan(
    element: ir.DataType,
    terms: tuple[Any, ...],  # logarithms, or the largest logarithms and the rests of sums
    axis: int,
    state_shape: Any,
    *,
    exclusive: bool = False,  # whether a sum excludes its term
) -> tuple[_Sums, _Sums]:
    """Return the total over ``axis``, and the sum up to each term, with or without the term."""
    numbers = (ir.tensor(number, dtype=element) for number in (-math.inf, 0.0))
    start = [op.Expand(op.Constant(value=number), state_shape) for number in numbers]
    # onnxscript's own Scan has one output.
    total_largest, total_rest, largest, rest = call_op(
        "Scan",
        *start,
        *terms,
        num_scan_inputs=len(terms),
        scan_input_axes=[axis] * len(terms),
        scan_output_axes=[axis] * 2,
        body=_body_of_sums(element, len(terms), exclusive=exclusive),
        _num_outputs=4,
    )
    return (total_largest, total_rest), (largest, rest)


def _body_of_sums(element: ir.DataType, count: int, *, exclusive: bool) -> ir.Graph:
    kind = ir.TensorType(element)
    names = ("largest_before", "rest_before", "term", "term_rest")[: 2 + count]
    before = [ir.val(name, type=kind) for name in names]
    body = GraphBody()
    zero = body.Constant(value=ir.tensor(0.0, dtype=element))
    after = _add(body, zero, *before, *[zero] * (2 - count))
    scanned = before[:2] if exclusive else after
    outputs = [body.Identity(value) for value in (*after, *scanned)]
    for output in outputs:
        output.type = kind
    return ir.Graph(before, outputs, nodes=body.nodes, name="logcumsumexp", opset_imports={"": 18})


def _add(ops: Any, zero: Any, largest: Any, rest: Any, other: Any, other_rest: Any) -> _Sums:
    """Add two sums, each of a largest logarithm and the rest."""
    # The difference of equal infinities is NaN.
    apart = ops.Where(ops.Equal(largest, other), zero, ops.Abs(ops.Sub(largest, other)))
    smaller = ops.Exp(ops.Neg(apart))
    one = ops.Exp(zero)
    scaled = ops.Mul(rest, ops.Where(ops.Less(largest, other), smaller, one))
    other_scaled = ops.Mul(other_rest, ops.Where(ops.Less(other, largest), smaller, one))
    return ops.Max(largest, other), ops.Add(ops.Add(scaled, other_scaled), smaller)
