"""The rows of tables that a captured program reads, for token ids below a bound."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from aftexport.capture.number_ranges import (
    EMBEDDINGS,
    KnownRanges,
    Range,
    operator_name,
    range_of,
)


@dataclass(frozen=True)
class Lookup:
    """A read of a table's rows by numbers computed from ids.

    Attributes:
        table: the name of the table's node; None without a table, as for ``one_hot``.
        rows: the number of rows.
        index: the range of the numbers.
        is_signed: whether negative numbers count rows from the end.
    """

    table: str | None
    rows: int
    index: Range
    is_signed: bool

    @property
    def fits(self) -> bool:
        """True if every number has a row."""
        lowest = -self.rows if self.is_signed else 0
        return lowest <= self.index.low and self.index.high < self.rows


class IdRanges:
    """The ranges of the integers that a program computes from its ids."""

    def __init__(self, program: ExportedProgram, ids: Node) -> None:
        self._ids = ids
        self._nodes = list(program.graph.nodes)
        signature = program.graph_signature
        names: Mapping[str, str] = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        tensors: Mapping[str, Any] = {**program.state_dict, **program.constants}
        self._constants = {
            node: range_of(tensors.get(names.get(node.name, "")))
            for node in self._nodes
            if node.op == "placeholder"
        }

    def lookups(self, count: int) -> list[Lookup]:
        """Return every lookup by numbers computed from ids, for ids below ``count``."""
        lookups: list[Lookup] = []
        known = KnownRanges(self._constants)
        known[self._ids] = Range(0, count - 1, of_ids=True, are_ids=True)
        for node in self._nodes:
            if node.op == "call_function":
                lookups += _lookups(known, node)
                known.add(node)
        return lookups


def _lookups(known: KnownRanges, node: Node) -> Iterator[Lookup]:
    name = operator_name(node).rstrip("_")
    for table, axis, index in _places(node, name):
        numbers = known.of(index)
        if not numbers.of_ids or _is_bool(index):
            continue
        value = table.meta.get("val") if isinstance(table, Node) else None
        rows = value.shape[axis] if isinstance(value, Tensor) and value.dim() else table
        if isinstance(rows, int) and rows >= 0:
            table_name = table.name if isinstance(table, Node) else None
            yield Lookup(table_name, rows, numbers, name in ("index", "index_put"))


def _places(node: Node, name: str) -> Iterator[tuple[Any, int, Any]]:
    """Yield the table, the axis of its rows and the index of each lookup.

    For ``one_hot`` the number of classes takes the place of the table.
    """
    args: Any = node.args
    if name in EMBEDDINGS:
        yield args[0], 0, args[1]
    elif name in _BY_AXIS and len(args) > 2 and isinstance(args[1], int):
        yield args[0], args[1], args[2]
    elif name in ("index", "index_put", "_unsafe_index", "_unsafe_index_put"):
        yield from ((args[0], axis, i) for axis, i in enumerate(args[1]) if i is not None)
    elif name == "one_hot" and len(args) > 1:
        yield args[1], 0, args[0]


_BY_AXIS = (
    *("index_select", "gather", "scatter", "scatter_add", "scatter_reduce"),
    *("index_add", "index_copy", "index_fill", "index_reduce"),
)


def _is_bool(index: Any) -> bool:
    value = index.meta.get("val") if isinstance(index, Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.bool
