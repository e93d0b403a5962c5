"""Translations for torch.onnx: mechanisms, pooling to a size, deviations, sums of logarithms.

torch.onnx itself cannot translate these operators, or only for the example's length, or not
accurately.
"""

import inspect
import math
import operator as python
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript import values

from aftexport.lowering.attention_translation import attention_translation
from aftexport.lowering.graph_body import GraphBody, constant, ints
from aftexport.lowering.scalar_functions import scalar_functions
from aftexport.lowering.size_floats import size_translations
from aftexport.operators.domain import DOMAIN, MAX_BLOCK, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.schema import Attribute
from aftexport.operators.torch_ops import OPERATORS, SINGLE_OPERATORS, Operator
from aftexport.system.internals.torch_translation import call_op

_aten = torch.ops.aten


MAX_WHOLE_TOKENS = 4096
"""The maximum tokens for which causal attention keeps all its scores, 64 MiB for each head."""


_NEVER_NEGATIVE = ("Shape", "Size")


_AS_INPUTS = ("Squeeze", "Unsqueeze", "Gather", "Slice", "Add", "Mul", "Div", "Max", "Cast")
"""Operators whose result is nonnegative if all inputs are."""


def translations(max_tokens: int = MAX_WHOLE_TOKENS) -> dict[Any, Callable[..., Any]]:
    """Return the translations for torch.onnx; a mechanism becomes one bare custom node.

    Args:
        max_tokens: the maximum tokens of a document. Causal attention of longer documents than
            ``MAX_WHOLE_TOKENS`` runs in blocks of queries.
    """
    attention = attention_translation(in_blocks=max_tokens > MAX_WHOLE_TOKENS)
    return (
        scalar_functions()
        | _deviations()
        | {o.torch_op: _translation(o) for o in (OPERATORS | SINGLE_OPERATORS).values()}
        | {
            _aten.adaptive_avg_pool1d.default: _adaptive_avg_pool1d,
            _aten.amax.default: _amax,
            _aten.amin.default: _amin,
            _aten.adaptive_max_pool1d.default: _adaptive_max_pool1d,
            _aten.logcumsumexp.default: _logcumsumexp,
            _aten.upsample_linear1d.vec: _upsample_linear1d,
            _aten.var_mean.correction: _var_mean,
            _aten.scaled_dot_product_attention.default: attention,
            python.floordiv: _floordiv,
        }
        | size_translations()
    )


def _translation(operator: Operator) -> Callable[..., Any]:
    """Return a function that emits one bare custom node, with a signature for torch.onnx."""
    for_kernel = {a.name: a.default for a in operator.kernel_attributes}
    emit = getattr(values.Opset(DOMAIN, VERSION), operator.op_type)
    names, attributes = list(operator.inputs), {a.name: a for a in operator.attributes}
    # The torch op has optional inputs behind the attributes.
    arguments = operator.torch_op._schema.arguments
    parameters = [_parameter(a, attributes.get(a.name)) for a in arguments]

    def translate(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
        bound.apply_defaults()
        tensors = [bound.arguments.pop(n) for n in names]
        while tensors[-1] is None:
            tensors.pop()
        return emit(*tensors, **bound.arguments, **for_kernel, **PLUGIN_ATTRIBUTES)

    translate.__name__ = operator.op_type
    translate.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    translate.__annotations__ = {a.name: type(a.default) for a in operator.attributes}
    return translate


def _parameter(argument: torch.Argument, attribute: Attribute | None) -> inspect.Parameter:
    """Return the parameter of an argument of a torch op, which is an attribute or an input."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if attribute is not None:
        value = attribute.default
        return inspect.Parameter(argument.name, kind, default=value, annotation=type(value))
    if argument.has_default_value():
        return inspect.Parameter(argument.name, kind, default=argument.default_value)
    return inspect.Parameter(argument.name, kind)


def _amax(self, dim=(), keepdim=False):  # type: ignore[no-untyped-def]
    return op.ReduceMax(self, [*dim] or None, keepdims=int(keepdim))


def _amin(self, dim=(), keepdim=False):  # type: ignore[no-untyped-def]
    return op.ReduceMin(self, [*dim] or None, keepdims=int(keepdim))


def _var_mean(self, dim=None, correction=None, keepdim=False):  # type: ignore[no-untyped-def]
    """Translate both at once: torch divides a float32 sum by a float64 number of tokens."""
    is_wide = self.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    wide = self if is_wide else op.Cast(self, to=ir.DataType.FLOAT)
    axes = [*dim] if dim else [*range(len(self.shape))]
    mean = op.ReduceMean(wide, axes, keepdims=1)
    deviations = op.Sub(wide, mean)
    total = op.ReduceSum(op.Mul(deviations, deviations), axes, keepdims=1)
    count = op.ReduceProd(op.Gather(op.Shape(self), constant(axes)), keepdims=0)
    free = op.Sub(op.CastLike(count, wide), float(1 if correction is None else correction))
    variance = op.Div(total, op.Max(free, op.CastLike(0.0, wide)))
    results = (op.CastLike(result, self) for result in (variance, mean))
    return tuple(result if keepdim else op.Squeeze(result, axes) for result in results)


def _adaptive_avg_pool1d(self, output_size):  # type: ignore[no-untyped-def]
    if tuple(output_size) == (1,):
        return op.ReduceMean(self, [-1], keepdims=1)
    windows, inside, starts, ends = _windows(self, output_size[0])
    total = op.ReduceSum(op.Where(inside, windows, op.CastLike(0.0, self)), [-1], keepdims=0)
    return op.Div(total, op.CastLike(op.Sub(ends, starts), self))


def _adaptive_max_pool1d(self, output_size):  # type: ignore[no-untyped-def]
    windows, inside, starts, _ = _windows(self, output_size[0])
    candidates = op.Where(inside, windows, op.CastLike(float("-inf"), self))
    largest = op.ReduceMax(candidates, [-1], keepdims=0)
    return largest, op.Add(op.ArgMax(candidates, axis=-1, keepdims=0), starts)


def _upsample_linear1d(input, output_size, align_corners, scale_factors=None):  # type: ignore[no-untyped-def]
    """Translate it whole: its decomposition divides by the tokens minus 1, which may be 0."""
    scales = sizes = None
    if output_size is None:
        scales = op.Constant(value_floats=[1.0, 1.0, *scale_factors])
    else:
        sizes = op.Concat(op.Shape(input, end=2), op.Cast(output_size, to=7), axis=0)
    coordinates = "align_corners" if align_corners else "half_pixel"
    return op.Resize(
        *(input, None, scales, sizes),
        mode="linear",
        coordinate_transformation_mode=coordinates,
    )


def _windows(x: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """Split the last axis of ``x [..., L]`` into ``count`` windows of equal length, or 1 apart.

    Returns:
        Windows ``[..., count, width]``, a mask bool ``[count, width]`` of the positions inside a
        window, and the starts and ends ``[count]`` of the windows.
    """
    length = op.Shape(x, start=-1)
    starts = op.Div(op.Mul(length, constant(range(count))), constant([count]))
    last = op.Add(op.Mul(length, constant(range(1, count + 1))), constant([count - 1]))
    ends = op.Div(last, constant([count]))
    width = op.ReduceMax(op.Sub(ends, starts), keepdims=0)
    zero, one = constant(0), constant(1)
    places = op.Add(op.Unsqueeze(starts, [1]), op.Range(zero, width, one))
    inside = op.Less(places, op.Unsqueeze(ends, [1]))
    return op.Gather(x, op.Min(places, op.Sub(length, one)), axis=-1), inside, starts, ends


def _floordiv(self, other):  # type: ignore[no-untyped-def]
    quotient = op.Div(self, other)
    if _never_negative(self) and _never_negative(other):
        return quotient
    # ONNX rounds to zero and Python rounds down: -(-tokens // 16) counts partial windows too.
    rest = op.Sub(self, op.Mul(quotient, other))
    return op.Sub(quotient, op.Cast(op.Less(op.Mul(rest, other), 0), to=ir.DataType.INT64))


def _never_negative(size: Any) -> bool:
    if isinstance(size, int):
        return size >= 0
    node = size.producer()
    if node is None or node.op_type == "Constant":
        constant = ir.convenience.get_const_tensor(size)
        return constant is not None and bool((constant.numpy() >= 0).all())
    if node.op_type in _NEVER_NEGATIVE:
        return True
    data = node.inputs[:1] if node.op_type in _AS_INPUTS[:4] else node.inputs
    return node.op_type in _AS_INPUTS and all(map(_never_negative, data))


# torch computes standard deviations in float64. torch.onnx squares in the type of the numbers: a
# float32 square is infinite for numbers above 1e19 and 0 for numbers below 1e-22.
def _deviations() -> dict[Any, Callable[..., Any]]:
    """Return the translations of the standard deviations of torch, for torch.onnx."""
    return {
        _aten.std.correction: _std,
        _aten.std.dim: _std_of_dims,
        _aten.std.default: _std_of_all,
        _aten.std_mean.correction: _std_mean,
    }


def _std(self, dim=None, correction=None, keepdim=False):  # type: ignore[no-untyped-def]
    return _deviation(self, dim, 1 if correction is None else correction, keepdim=keepdim)


def _std_of_dims(self, dim=None, unbiased=True, keepdim=False):  # type: ignore[no-untyped-def]
    return _deviation(self, dim, int(unbiased), keepdim=keepdim)


def _std_of_all(self, unbiased=True):  # type: ignore[no-untyped-def]
    return _deviation(self, None, int(unbiased), keepdim=False)


def _std_mean(self, dim=None, correction=None, keepdim=False):  # type: ignore[no-untyped-def]
    mean = op.ReduceMean(self, _axes(dim), keepdims=int(keepdim))
    unbiased = 1 if correction is None else correction
    return _deviation(self, dim, unbiased, keepdim=keepdim), mean


def _deviation(x: Any, dim: Sequence[int] | int | None, correction: float, *, keepdim: bool) -> Any:
    axes, original = _axes(dim), x
    if x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        x = op.Cast(x, to=ir.DataType.FLOAT)  # 16 bits cannot hold every number of tokens
    zero, one = op.CastLike(0.0, x), op.CastLike(1.0, x)
    apart = _less_mean(_less_mean(x, axes), axes)  # the second removes the first one's rounding
    largest = op.ReduceMax(op.Abs(apart), axes, keepdims=1)
    scale = op.Where(op.Greater(largest, zero), largest, one)
    ratio = op.Div(apart, scale)
    squares = op.ReduceSum(op.Mul(ratio, ratio), axes, keepdims=1)
    left = op.Max(op.Sub(_count(x, axes), op.CastLike(float(correction), x)), zero)
    result = op.CastLike(op.Mul(scale, op.Sqrt(op.Div(squares, left))), original)
    if keepdim:
        return result
    return op.Squeeze(result, axes) if axes is not None else op.Squeeze(result)


def _less_mean(x: Any, axes: Any) -> Any:
    # Division before the sum keeps numbers near the largest float from overflowing.
    return op.Sub(x, op.ReduceSum(op.Div(x, _count(x, axes)), axes, keepdims=1))


def _count(x: Any, axes: Any) -> Any:
    shape = op.Shape(x)
    sizes = shape if axes is None else op.Gather(shape, axes)
    return op.CastLike(op.ReduceProd(sizes, keepdims=0), x)


def _axes(dim: Sequence[int] | int | None) -> Any:
    axes = [dim] if isinstance(dim, int) else [*(dim or ())]
    return op.Constant(value_ints=axes) if axes else None


# log(cumsum(exp(x))) overflows for x of 89 and more; after subtraction of the overall maximum it
# loses the terms before the maximum. A scan keeps a sum of powers as its largest logarithm and the
# rest: the sum is exp(largest) * (1 + rest). Blocks are scanned in parallel, then their totals, and
# each block's sums are added to the total of the blocks before it.
_SIDE_BY_SIDE = 16
"""The number of blocks of a short sequence, which reduces the steps of its scans."""

_Sums = tuple[Any, Any]
"""The largest logarithms and the rests."""


def _logcumsumexp(self, dim: int):  # type: ignore[no-untyped-def]
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
    """Return the number of blocks and their size, as ``two_level_sums.scan_cut`` does."""

    def quotient_up(count: Any, part: Any) -> Any:
        return op.Div(op.Sub(op.Add(count, part), ints(1)), part)

    some = op.Min(quotient_up(terms, ints(_SIDE_BY_SIDE)), ints(_SIDE_BY_SIDE))
    blocks = op.Max(quotient_up(terms, ints(MAX_BLOCK)), some, ints(1))
    return blocks, op.Max(quotient_up(terms, blocks), ints(1))


def _scan(
    element: ir.DataType,
    terms: tuple[Any, ...],
    axis: int,
    state_shape: Any,
    *,
    exclusive: bool = False,
) -> tuple[_Sums, _Sums]:
    """Return the total over ``axis``, and the sum up to each term, with or without the term.

    Args:
        element: the type of the terms.
        terms: logarithms, or the largest logarithms and the rests of sums.
        axis: the axis of the terms.
        state_shape: the shape of a term.
        exclusive: whether a sum excludes its term.
    """
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
        body=_body(element, len(terms), exclusive=exclusive),
        _num_outputs=4,
    )
    return (total_largest, total_rest), (largest, rest)


def _body(element: ir.DataType, count: int, *, exclusive: bool) -> ir.Graph:
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
