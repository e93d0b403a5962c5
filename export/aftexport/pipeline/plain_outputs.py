"""The outputs of any ONNX model under names and axes of an exported model."""

import re
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from aftexport.errors import TraceError
from aftexport.lowering.graph_values import axes_of
from aftexport.lowering.new_nodes import NewNodes
from aftexport.lowering.value_names import free_name, value_names
from aftexport.system.contract import AXES, EVIDENCE

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_MAX_NAME = 64
_AXES = {2: ("batch",), 3: ("batch", "tokens")}
_SAME_NUMBERS = ("Squeeze", "Reshape", "Flatten", "Gather")
"""Operators by which a graph drops the axis of a width of 1."""


def use_plain_outputs(model: ir.Model) -> dict[str, str]:
    """Keep the outputs of numbers, under names that a bundle can have.

    Args:
        model: the model, which is changed in place.

    Returns:
        Each changed output with its new name; empty for one that is left out, because it holds no
        floating-point numbers.

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
    """Give outputs with one number for each document or token an axis of width 1, in place.

    Args:
        model: the model.
        names: the outputs ``[batch]`` or ``[batch, tokens]``.
    """
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
