"""The inputs and outputs of any ONNX model under names and axes of an exported model."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from aftexport.errors import TraceError
from aftexport.lowering.graph_values import axes_of, free_name, value_names
from aftexport.lowering.nodes import NewNodes
from aftexport.system.contract import AXES, EVIDENCE, FEATURES, IDS, LENGTHS

_MASKS = ("attention_mask", "input_mask", "mask")
_SEGMENTS = ("token_type_ids", "segment_ids")
_POSITIONS = ("position_ids",)
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
_NUMBERS = (*_INTEGERS, ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.FLOAT16)
_EXPECTED = (
    f"{IDS} [batch, tokens] or {FEATURES} [batch, tokens, features] and, if used, {LENGTHS} "
    "[batch], attention_mask, token_type_ids or position_ids [batch, tokens]"
)
_WRAP = "Export the model again with these inputs only."


def use_plain_inputs(model: ir.Model) -> tuple[str, ...]:
    """Change the inputs of a model to ids or features and, if it has a use for them, lengths.

    Raises:
        TraceError: if it needs other inputs, or an axis of batch or tokens is fixed.
    """
    given = [v for v in model.graph.inputs if v.name not in model.graph.initializers]
    main = _main_input(given)
    _check_axes(main)
    return _Inputs(model, main, given).change()


def _main_input(given: list[ir.Value]) -> ir.Value:
    """Return the input with the tokens: by its name, or the only one of ids or features."""
    by_name = {value.name: value for value in given}
    for name in (IDS, FEATURES):
        if name in by_name:
            return by_name[name]
    others = [v for v in given if v.name not in (*_MASKS, *_SEGMENTS, *_POSITIONS, LENGTHS)]
    if len(others) != 1:
        raise _unusual(given)
    return others[0]


def _check_axes(main: ir.Value) -> None:
    shape, is_ids = main.shape, main.dtype in _INTEGERS
    rank = 2 if is_ids else 3
    if shape is None or len(shape) != rank or not (is_ids or main.dtype == ir.DataType.FLOAT):
        found = "no shape" if shape is None else f"{main.dtype} {_text(shape)}"
        raise TraceError(
            f"Expected int64 [batch, tokens] or float32 [batch, tokens, features] for the input "
            f"{main.name!r}, got {found}.",
            _WRAP,
        )
    for axis, size in zip(("batch", "tokens"), shape, strict=False):
        if isinstance(size, int):
            raise TraceError(
                f"Expected a dynamic {axis} axis of the input {main.name!r}, got {axis} fixed at "
                f"{size}.",
                "Export the model again with dynamic axes: dynamic_shapes of torch.onnx.export.",
            )
    if not is_ids and not isinstance(shape[2], int):
        raise TraceError(
            f"Expected a fixed number of features of the input {main.name!r}, got {_text(shape)}.",
            "Export the model again with a fixed last axis.",
        )


def _unusual(given: list[ir.Value]) -> TraceError:
    names = ", ".join(f"{value.name} {_text(value.shape)}" for value in given) or "none"
    return TraceError(f"Expected the inputs {_EXPECTED}, got {names}.", _WRAP)


def _text(shape: ir.Shape | None) -> str:
    sizes = () if shape is None else shape
    return f"[{', '.join(str(size) for size in sizes)}]"


class _Inputs:
    """The inputs of a model, old and new."""

    def __init__(self, model: ir.Model, main: ir.Value, given: list[ir.Value]) -> None:
        self._graph = model.graph
        self._main = main
        self._given = given
        self._names = value_names(model.graph)
        self._nodes: list[ir.Node] = []
        self._has_lengths = False
        is_ids = main.dtype in _INTEGERS
        last = () if is_ids or main.shape is None else (main.shape[2],)
        self._tokens = ir.val(
            IDS if is_ids else FEATURES,
            dtype=ir.DataType.INT64 if is_ids else ir.DataType.FLOAT,
            shape=ir.Shape(("batch", "tokens", *last)),
        )
        self._lengths = ir.val(LENGTHS, dtype=ir.DataType.INT64, shape=ir.Shape(("batch",)))

    def change(self) -> tuple[str, ...]:
        """Change the inputs of the graph, and return their names."""
        for value in self._given:
            make = self._maker(value)
            value.replace_all_uses_with(make(value), replace_graph_outputs=True)
            value.name = f"given_{value.name}"
        inputs = [self._tokens, *([self._lengths] if self._has_lengths else [])]
        kept = [v for v in self._graph.inputs if v not in self._given]
        self._graph.inputs.clear()
        self._graph.inputs.extend([*inputs, *kept])
        if self._nodes:
            self._graph.insert_before(self._graph[0], self._nodes)
        return tuple(str(value.name) for value in inputs)

    def _maker(self, value: ir.Value) -> Callable[[ir.Value], ir.Value]:
        """Return the function that makes the numbers of an input."""
        name, rank = value.name, None if value.shape is None else len(value.shape)
        if value is self._main:
            return lambda given: self._cast(self._tokens, given)
        if name == LENGTHS and rank == 1 and value.dtype in _INTEGERS:
            return self._lengths_of
        per_token = rank == 2 and value.dtype in _NUMBERS
        for names, make in (
            (_MASKS, self._mask), (_SEGMENTS, self._zeros), (_POSITIONS, self._positions)
        ):  # fmt: skip
            if name in names and per_token:
                return make
        raise _unusual(self._given)

    def _lengths_of(self, given: ir.Value) -> ir.Value:
        self._has_lengths = True
        return self._cast(self._lengths, given)

    def _mask(self, given: ir.Value) -> ir.Value:
        self._has_lengths = True
        column = self._node("Unsqueeze", [self._lengths, self._constant([1])])
        mask = self._node("Less", [self._range(), column])
        # Shape inference knows no name for the axis of Range.
        mask.dtype, mask.shape = ir.DataType.BOOL, ir.Shape(("batch", "tokens"))
        return self._cast(mask, given)

    def _zeros(self, given: ir.Value) -> ir.Value:
        return self._cast(self._node("ConstantOfShape", [self._shape()], _zero()), given)

    def _positions(self, given: ir.Value) -> ir.Value:
        return self._cast(self._node("Expand", [self._range(), self._shape()]), given)

    def _range(self) -> ir.Value:
        """Return the positions of the tokens, ``[tokens]``."""
        count = self._node("Gather", [self._shape(), self._constant(1)])
        return self._node("Range", [self._constant(0), count, self._constant(1)])

    def _shape(self) -> ir.Value:
        """Return ``[batch, tokens]``."""
        return self._node("Shape", [self._tokens], {"start": 0, "end": 2})

    def _cast(self, value: ir.Value, like: ir.Value) -> ir.Value:
        if value.dtype == like.dtype:
            return value
        assert like.dtype is not None  # checked with its shape
        return self._node("Cast", [value], {"to": int(like.dtype)})

    def _constant(self, numbers: list[int] | int) -> ir.Value:
        name = self._free_name(f"plain_constant_{len(self._graph.initializers)}")
        tensor = ir.tensor(numbers, dtype=ir.DataType.INT64, name=name)
        value = ir.val(name, const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def _node(
        self,
        op_type: str,
        inputs: list[ir.Value],
        attributes: dict[str, int | ir.TensorProtocol] | None = None,
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes or {})
        output = node.outputs[0]
        output.name = self._free_name(f"plain_input_{len(self._nodes)}")
        self._nodes.append(node)
        return output

    def _free_name(self, name: str) -> str:
        found = free_name(name, self._names)
        self._names.add(found)
        return found


def _zero() -> dict[str, int | ir.TensorProtocol]:
    return {"value": ir.tensor([0], dtype=ir.DataType.INT64)}


_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_MAX_NAME = 64
_AXES = {2: ("batch",), 3: ("batch", "tokens")}
_SAME_NUMBERS = ("Squeeze", "Reshape", "Flatten", "Gather")
"""Operators by which a graph drops the axis of a width of 1."""


def use_plain_outputs(model: ir.Model) -> dict[str, str]:
    """Keep the outputs of numbers; return each changed output with its new name, empty if left out.

    Raises:
        TraceError: if no such output is left, or one has another type than float32 and float16.
    """
    changed: dict[str, str] = {}
    kept: list[ir.Value] = []
    names = value_names(model.graph)
    for value in model.graph.outputs:
        old = str(value.name)
        if value.dtype is not None and not value.dtype.is_floating_point():
            changed[old] = ""
            continue
        if value.dtype not in _FLOATS:
            raise TraceError(
                f"Expected float32 or float16 for the output {old!r}, got {value.dtype}.",
                "Cast it to float32 in the model, and export the model again.",
            )
        name = _plain_name(old, names - {old})
        if name != old:
            changed[old] = value.name = name
            names.add(name)
        kept.append(value)
    if not kept:
        raise TraceError(
            "Expected an output of floating-point numbers, got none.",
            "Return the logits from the model, and export it again.",
        )
    model.graph.outputs.clear()
    model.graph.outputs.extend(kept)
    return changed


def add_width(model: ir.Model, names: Collection[str]) -> None:
    """Give outputs ``[batch]`` or ``[batch, tokens]`` an axis of width 1, in place."""
    graph = model.graph
    taken = value_names(graph)
    for place, value in enumerate(graph.outputs):
        if value.name not in names:
            continue
        name, axes, node = str(value.name), axes_of(value), value.producer()
        value.name = free_name(f"{name}_without_width", taken)
        taken.add(value.name)
        wide = node.inputs[0] if node is not None and node.op_type in _SAME_NUMBERS else None
        is_spare = wide is not None and wide.producer() is not None and wide not in graph.outputs
        if wide is None or not is_spare or axes_of(wide) != [*axes, 1]:
            new = NewNodes(graph, name)
            wide = new.add("Unsqueeze", value, new.constant([-1]))
            graph.extend(new.nodes)
        wide.name, wide.type = name, value.type
        wide.shape = None if value.shape is None else ir.Shape((*value.shape, 1))
        graph.outputs[place] = wide
        if node is not None and not value.uses() and value is not wide:
            graph.remove(node, safe=True)


def name_axes(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> None:
    """Set the axes of the outputs to batch, tokens and the width in ``shapes``, from a run."""
    for value in model.graph.outputs:
        shape = shapes[str(value.name)]
        if len(shape) in _AXES:
            value.shape = ir.Shape((*_AXES[len(shape)], shape[-1]))


def _plain_name(name: str, others: Collection[str]) -> str:
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)[: _MAX_NAME - 8] or "output"
    if plain in AXES or plain.startswith(EVIDENCE) or plain[0].isdigit():
        plain = f"output_{plain}"
    return free_name(plain, others)
