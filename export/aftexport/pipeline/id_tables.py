"""The tables that token ids and positions are looked up in."""

from collections.abc import Iterator

import onnx_ir as ir

_SAME_IDS = (
    "Cast", "Clip", "Expand", "Flatten", "Identity", "Max", "Min", "Reshape", "Squeeze",
    "Unsqueeze", "Where",
)  # fmt: skip
"""Operators whose result has the ids of their inputs."""
_LOOKUPS = ("Gather", "GatherElements", "GatherND", "Slice")


def id_table(model: ir.Model, ids: ir.Value) -> ir.Value | None:
    """Return the smallest constant table with a row for each token id; None without one."""
    tables = [
        node.inputs[0]
        for value in _same_ids(ids)
        for node, place in value.uses()
        if node.op_type == "Gather" and place == 1 and node.attributes.get_int("axis", 0) == 0
    ]
    constant = [t for t in tables if t is not None and t.const_value is not None]
    return min(constant, key=_rows, default=None)


def position_sizes(model: ir.Model, ids: ir.Value) -> list[int]:
    """Return the sizes of other constants that nodes look rows up in, ascending.

    A table of positions, a mask or a rotation for every position is among them.
    """
    own = set(_same_ids(ids))
    sizes: set[int] = set()
    for node in model.graph:
        table = node.inputs[0] if node.op_type in _LOOKUPS and node.inputs else None
        if table is None or table.const_value is None:
            continue
        if node.op_type == "Gather" and node.inputs[1] in own:
            continue
        sizes.update(size for size in table.const_value.shape.numpy() if size > 1)
    return sorted(sizes)


def _same_ids(ids: ir.Value) -> Iterator[ir.Value]:
    """Yield the values with the numbers of the ids."""
    pending, seen = [ids], set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        yield value
        for node, place in value.uses():
            if node.op_type in _SAME_IDS and (place == 0 or node.op_type != "Reshape"):
                pending += node.outputs


def _rows(table: ir.Value) -> int:
    assert table.const_value is not None  # chosen by it
    return table.const_value.shape.numpy()[0]
