"""Translations for torch.onnx of the mechanisms, of pooling to a fixed size and of size division.

torch.onnx itself cannot translate these operators, or only for the example's length.
"""

import inspect
import operator as python
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript import values

from aftexport.lowering.attention_translation import attention_translation
from aftexport.lowering.constant_numbers import constant
from aftexport.lowering.cumulative_log_sum import logcumsumexp
from aftexport.lowering.deviations import deviations
from aftexport.lowering.scalar_functions import scalar_functions
from aftexport.lowering.size_floats import size_translations
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.schema import Attribute
from aftexport.operators.torch_ops import OPERATORS, RECURRENT_OPERATORS, Operator

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
        | deviations()
        | {o.torch_op: _translation(o) for o in (OPERATORS | RECURRENT_OPERATORS).values()}
        | {
            _aten.adaptive_avg_pool1d.default: _adaptive_avg_pool1d,
            _aten.amax.default: _amax,
            _aten.amin.default: _amin,
            _aten.adaptive_max_pool1d.default: _adaptive_max_pool1d,
            _aten.logcumsumexp.default: logcumsumexp,
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
