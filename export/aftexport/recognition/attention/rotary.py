"""Rotary positions between the operands of softmax attention and their product.

    RoFormer, arXiv 2104.09864, eq. 34:  y[2i] = x[2i] cos - x[2i+1] sin, and so on

Tables are numbers of positions only. With ones for the cosines and zeros for the sines, a rotation
only moves entries; the other way around, it shows the partner of each channel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.errors import EngineError
from aftexport.recognition.attention.masks import SizeRunner
from aftexport.recognition.attention.operands import (
    MOVES,
    Operand,
    Reading,
    Rotation,
    batch_of,
    path_up,
    runs_of,
)
from aftexport.recognition.attention.structure import Content
from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.patterns.pattern import NearMissFound

Array = NDArray[np.generic]
_SIZES = (1, 2, 5, 33, 257)
"""The tokens at which tables are compared."""


@dataclass(frozen=True)
class Rotary:
    """The rotation of the first ``width`` channels of each head."""

    width: int
    interleaved: bool
    cosine: ir.Value  # a table with a row for each token; its last axis has all or half the width
    sine: ir.Value


@dataclass(frozen=True)
class Rotated:
    """An operand before its rotation."""

    operand: Operand
    rotary: Rotary
    tables: tuple[ir.Value, ...]


def rotated(reading: Reading, content: Content, sizes: SizeRunner) -> Rotated | None:
    """Return an operand before its rotation; None without one."""
    try:
        rotation = _rotation(reading.value, reading.probed, content, sizes)
        if rotation is None:
            return None
        operand = reading.operand(rotation)
        found = _width(reading, operand, rotation)
        if found is None:
            return None
        width, interleaved = found
        tables = [
            _table(values, width, sizes, interleaved=interleaved)
            for values in (rotation.cosines, rotation.sines)
        ]
    except (EngineError, NearMissFound):
        return None  # the rotation stays before the operator
    if tables[0] is None or tables[1] is None:
        return None
    rotary = Rotary(width, interleaved, tables[0], tables[1])
    return Rotated(operand, rotary, (*rotation.cosines, *rotation.sines))


def same_tables(one: Rotary, other: Rotary, sizes: SizeRunner) -> bool:
    """Return whether two rotations are the same."""
    if (one.width, one.interleaved) != (other.width, other.interleaved):
        return False
    values = (one.cosine, one.sine, other.cosine, other.sine)
    if values[:2] == values[2:]:
        return True
    for tokens, arrays in _runs(values, sizes):
        first, second, third, fourth = (_rows(array, tokens) for array in arrays)
        if not (np.array_equal(first, third) and np.array_equal(second, fourth)):
            return False
    return True


def _rotation(
    value: ir.Value, probed: ProbedGraph, content: Content, sizes: SizeRunner
) -> Rotation | None:
    """Return the nearest source from which a value is computed by tables; None without tables."""
    top, factor = [*path_up(value, probed)][-1]
    above: dict[ir.Value, list[ir.Value]] = {}
    tables: dict[ir.Value, None] = {}
    pending = [top]
    while pending:
        current = pending.pop()
        if current not in above:
            above[current] = _sources(current, probed, content, tables)
            pending += above[current]
    source = _gate(top, above)
    if source is None or not tables:
        return None
    used = _between(top, source, above)
    kinds: dict[bool, list[ir.Value]] = {False: [], True: []}
    for table in tables:
        if any(reader in used for reader, _ in _results(table)):
            kinds[_starts_at_zero(table, sizes)].append(table)
    if not kinds[False] or not kinds[True]:
        return None
    return Rotation(source, factor, tuple(kinds[False]), tuple(kinds[True]))


def _results(value: ir.Value) -> list[tuple[ir.Value, int]]:
    return [(output, place) for node, place in value.uses() for output in node.outputs]


def _sources(
    value: ir.Value, probed: ProbedGraph, content: Content, tables: dict[ir.Value, None]
) -> list[ir.Value]:
    """Return the values that a value is a linear function of, none if it is of another kind."""
    node = value.producer()
    if node is None:
        return []
    inputs = [v for v in node.inputs if v is not None]
    if node.op_type in MOVES or node.op_type == "Neg":
        return inputs[:1] if content.has(inputs[0]) else []
    if node.op_type == "Mul" and len(inputs) == 2:
        of_content = [v for v in inputs if content.has(v)]
        if len(of_content) != 1:
            return []
        (other,) = (v for v in inputs if v is not of_content[0])
        if probed.number(other) is None:
            tables[other] = None
        return of_content
    if node.op_type in ("Add", "Sub", "Concat") and all(content.has(v) for v in inputs):
        return inputs
    return []


def _gate(top: ir.Value, above: dict[ir.Value, list[ir.Value]]) -> ir.Value | None:
    """Return the nearest value that every way up from the top passes; None without one."""
    leaves = {value for value, sources in above.items() if not sources}
    for candidate in above:
        if candidate is not top and not leaves & _between(top, candidate, above) - {candidate}:
            return candidate
    return None


def _between(top: ir.Value, end: ir.Value, above: dict[ir.Value, list[ir.Value]]) -> set[ir.Value]:
    """Return the values from the top up to an end, which is left out."""
    pending, seen = [top], set[ir.Value]()
    while pending:
        value = pending.pop()
        if value is not end and value not in seen:
            seen.add(value)
            pending += above[value]
    return seen


def _starts_at_zero(table: ir.Value, sizes: SizeRunner) -> bool:
    """Return whether the row of the first token is 0, as that of sines."""
    (array,) = sizes.run([table], np.array([5, 5]), 5)
    return not _rows(array, 5)[0].any()


def _rows(array: Array, tokens: int) -> Array:
    """Return a table as ``[tokens, width]``; raise NearMissFound for one of documents or heads."""
    if array.size != tokens * array.shape[-1] or tokens not in array.shape[:-1]:
        raise NearMissFound("its tables of positions are of more than tokens")
    return array.reshape(tokens, -1)


def _width(reading: Reading, operand: Operand, rotation: Rotation) -> tuple[int, bool] | None:
    """Return the rotated channels of a head, and whether pairs are neighbours; None for others."""
    found = None
    given = rotation.filled(0.0, 1.0)
    for run, lead in zip(runs_of(reading.probed), reading.lead, strict=True):
        turned = reading.entries(operand.source, operand.scale, run, lead, given)
        if turned is None:
            return None
        shape = run[str(operand.source.name)].shape
        numbers = np.arange(1, 1 + np.prod(shape)).reshape(shape).transpose(operand.order)
        rows = numbers.reshape(batch_of(run), shape[operand.order[1]], -1)
        plain = rows[:, :, operand.channels].transpose(0, 2, 1, 3)
        changed = (turned != plain).reshape(-1, plain.shape[-1]).any(0)
        width = int(changed.sum())
        if not width or width % 2:
            return None
        head, rest = plain[..., :width], plain[..., width:]
        half = width // 2
        halves = np.concatenate([-head[..., half:], head[..., :half], rest], -1)
        pairs = np.stack([-head[..., 1::2], head[..., ::2]], -1).reshape(head.shape)
        forms = {False: halves, True: np.concatenate([pairs, rest], -1)}
        fitting = [name for name, form in forms.items() if np.array_equal(turned, form)]
        if not fitting or found not in (None, (width, fitting[0])):
            return None
        found = (width, fitting[0])
    return found


def _table(
    values: Sequence[ir.Value], width: int, sizes: SizeRunner, *, interleaved: bool
) -> ir.Value | None:
    """Return one of equal tables, whose halves or neighbours are equal; None for others."""
    for tokens, arrays in _runs(values, sizes):
        halves = [_half(_rows(a, tokens), width, interleaved=interleaved) for a in arrays]
        parts = [half for half in halves if half is not None]
        if len(parts) < len(values) or not all(np.array_equal(p, parts[0]) for p in parts):
            return None
    return values[0]


def _runs(values: Sequence[ir.Value], sizes: SizeRunner) -> Iterator[tuple[int, list[Array]]]:
    """Yield tokens and the tables of as many, up to the longest document that the model takes."""
    for tokens in _SIZES:
        try:
            arrays = sizes.run(values, np.array([tokens, (tokens + 1) // 2]), tokens)
        except EngineError:
            return
        yield tokens, arrays


def _half(rows: Array, width: int, *, interleaved: bool) -> Array | None:
    if rows.shape[1] == width // 2:
        return rows
    first, second = (rows[:, ::2], rows[:, 1::2]) if interleaved else np.split(rows, 2, 1)
    return first if rows.shape[1] == width and np.array_equal(first, second) else None
