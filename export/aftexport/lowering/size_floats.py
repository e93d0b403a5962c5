"""Floats computed from sizes, such as ``tokens ** 0.5``, with the precision of Python.

torch.onnx computes them in float32, in which ``int(tokens * 0.29)`` is another number of tokens.
Here they stay float64 until an operator combines them with a tensor.
"""

import math
import operator as python
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from torch.export import ExportedProgram
from torch.fx import Node

from aftexport.system.internals.torch_operators import OpOverload, sym_sqrt

_aten = torch.ops.aten
_DOUBLE, _INTEGER = ir.DataType.DOUBLE, ir.DataType.INT64
_NARROW = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_BY_TENSOR: dict[Any, Any] = {
    _aten.pow.Tensor_Scalar: _aten.pow.Tensor_Tensor,
    _aten.pow.Scalar: _aten.pow.Tensor_Tensor,
    _aten.add.Scalar: _aten.add.Tensor,
    _aten.sub.Scalar: _aten.sub.Tensor,
    _aten.mul.Scalar: _aten.mul.Tensor,
    _aten.div.Scalar: _aten.div.Tensor,
    _aten.masked_fill.Scalar: _aten.masked_fill.Tensor,
}
"""Operators that take a number, each with its overload that takes a tensor ``[]``."""
_HALVES = (torch.float16, torch.bfloat16)


def cast_size_floats(program: ExportedProgram) -> None:
    """Replace each size float among operator arguments by a tensor ``[]`` of the operator's type.

    A 16-bit operator computes with it in float32, as torch does.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        if any(_is_size_float(argument) for argument in node.args) and value.is_floating_point():
            _cast(graph, node, value)
    program.graph_module.recompile()


def _is_size_float(argument: object) -> bool:
    return isinstance(argument, Node) and isinstance(argument.meta.get("val"), torch.SymFloat)


def _cast(graph: Any, node: Node, value: torch.Tensor) -> None:
    target = _BY_TENSOR.get(node.target, node.target)
    if not isinstance(target, OpOverload):
        return
    kinds = [str(argument.type) for argument in target._schema.arguments]
    wide = torch.float32 if value.dtype in _HALVES else value.dtype

    def converted(argument: Any, kind: str) -> Any:
        if kind != "Tensor" or not isinstance(argument, Node):
            return argument
        current = argument.meta["val"]
        with graph.inserting_before(node):
            if isinstance(current, torch.SymFloat):
                options: dict[str, Any] = {"dtype": wide}
                tensor = graph.call_function(_aten.scalar_tensor.default, (argument,), options)
                tensor.meta["val"] = value.new_empty((), dtype=wide)
            elif current.dtype in _HALVES:
                tensor = _copy(graph, argument, current, wide)
            else:
                return argument
        return tensor

    node.target = target
    node.args = tuple(converted(a, kind) for a, kind in zip(node.args, kinds, strict=False))
    if wide != value.dtype:
        with graph.inserting_after(node):
            narrow = _copy(graph, node, value, value.dtype)
        node.replace_all_uses_with(narrow, lambda user: user is not narrow)
        node.meta["val"] = value.to(wide)


def _copy(graph: Any, node: Node, value: torch.Tensor, dtype: torch.dtype) -> Node:
    copied: Node = graph.call_function(_aten._to_copy.default, (node,), {"dtype": dtype})
    copied.meta.update(node.meta, val=value.to(dtype))
    return copied


def cast_mixed_inputs(model: ir.Model) -> None:
    """Cast each size float that an operator combines with a tensor of another type.

    Decompositions of torch.onnx, as that of ``interpolate``, compute size floats of their own.
    """
    opset = model.opset_imports[""]
    for node in list(model.graph.all_nodes()):
        if node.domain or not any(_dtype(value) == _DOUBLE for value in node.inputs):
            continue
        formal = onnx.defs.get_schema(node.op_type, opset).inputs
        kinds = [formal[min(i, len(formal) - 1)].type_str for i in range(len(node.inputs))]
        for index, (value, kind) in enumerate(zip(node.inputs, kinds, strict=True)):
            alike = {_dtype(v) for v, k in zip(node.inputs, kinds, strict=True) if k == kind}
            narrow = next((dtype for dtype in _NARROW if dtype in alike), None)
            if narrow is not None and _dtype(value) == _DOUBLE:
                cast = ir.node("Cast", [value], {"to": narrow})
                assert node.graph is not None
                node.graph.insert_before(node, cast)
                node.replace_input_with(index, cast.outputs[0])


def _dtype(value: ir.Value | None) -> ir.DataType | None:
    return None if value is None else value.dtype


def size_translations() -> dict[Any, Callable[..., Any]]:
    """Return the translations of functions of sizes, for torch.onnx."""
    return {
        torch.sym_float: _double,
        sym_sqrt: _sqrt,
        torch.sym_max: _max,
        torch.sym_min: _min,
        python.add: _add,
        python.sub: _sub,
        python.mul: _mul,
        python.truediv: _truediv,
        python.pow: _pow,
        round: _round,
        math.floor: _floor,
    }


def _wide(number: Any) -> Any:
    if isinstance(number, int | float):
        return op.Constant(value=ir.tensor(np.float64(number)))
    return number if number.dtype == _DOUBLE else op.Cast(number, to=_DOUBLE)


def _alike(*numbers: Any) -> tuple[Any, ...]:
    """Return the numbers in float64 unless all of them are integers."""
    is_float = any(isinstance(n, float) or getattr(n, "dtype", None) == _DOUBLE for n in numbers)
    return tuple(map(_wide, numbers)) if is_float else numbers


def _double(self):  # type: ignore[no-untyped-def]
    return _wide(self)


def _add(self, other):  # type: ignore[no-untyped-def]
    return op.Add(*_alike(self, other))


def _sub(self, other):  # type: ignore[no-untyped-def]
    return op.Sub(*_alike(self, other))


def _mul(self, other):  # type: ignore[no-untyped-def]
    return op.Mul(*_alike(self, other))


def _max(self, other):  # type: ignore[no-untyped-def]
    return op.Max(*_alike(self, other))


def _min(self, other):  # type: ignore[no-untyped-def]
    return op.Min(*_alike(self, other))


def _truediv(self, other):  # type: ignore[no-untyped-def]
    return op.Div(_wide(self), _wide(other))


def _pow(self, exponent):  # type: ignore[no-untyped-def]
    return op.Pow(*_alike(self, exponent))


def _sqrt(self):  # type: ignore[no-untyped-def]
    return op.Sqrt(_wide(self))


def _round(self, digits=None):  # type: ignore[no-untyped-def]
    return op.Cast(op.Round(self), to=_INTEGER)


def _floor(self):  # type: ignore[no-untyped-def]
    return op.Cast(op.Floor(self), to=_INTEGER)
