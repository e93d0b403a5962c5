"""The outputs of any ONNX model under names and axes of an exported model."""

import re
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from aftexport.contract import AXES, EVIDENCE
from aftexport.errors import TraceError
from aftexport.passes.value_names import free_name, value_names

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_MAX_NAME = 64
_AXES = {2: ("batch",), 3: ("batch", "tokens")}


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
