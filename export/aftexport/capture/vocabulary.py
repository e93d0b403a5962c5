"""The number of token ids that a captured program accepts."""

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
from aftexport.errors import TraceError, UsageError
from aftexport.extra_inputs import ExtraInput
from aftexport.system.contract import MAX_VOCABULARY
from aftexport.system.internals.torch_operators import HigherOrderOperator


@dataclass(frozen=True)
class _Lookup:
    """A read of a table's rows by numbers computed from ids."""

    table: str | None  # the name of the table's node; None without a table, as for ``one_hot``
    rows: int
    index: Range
    is_signed: bool  # whether negative numbers count rows from the end

    @property
    def fits(self) -> bool:
        """True if every number has a row."""
        lowest = -self.rows if self.is_signed else 0
        return lowest <= self.index.low and self.index.high < self.rows


class _IdRanges:
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

    def lookups(self, count: int) -> list[_Lookup]:
        """Return every lookup by numbers computed from ids, for ids below ``count``."""
        lookups: list[_Lookup] = []
        known = KnownRanges(self._constants)
        known[self._ids] = Range(0, count - 1, of_ids=True, are_ids=True)
        for node in self._nodes:
            if node.op == "call_function":
                lookups += _lookups(known, node)
                known.add(node)
        return lookups


MAX_IDS = MAX_VOCABULARY
"""The number of ids for a model that accepts every id, e.g. by clamping or by a modulus."""
_GIVE = "give --vocab-size N, with every id below N"


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a program."""

    size: int  # the number of ids; every id is below it
    # Name of the parameter with a row for each id, and of several the one with the fewest rows;
    # empty if there is none.
    embedding: str


def read_vocabulary(
    program: ExportedProgram, ids: Node, vocab_size: int | None = None
) -> Vocabulary:
    """Return the ids that a program accepts, by the tables in which it looks them up.

    ``vocab_size`` is the number of ids by ``--vocab-size``; None for the maximum.

    Raises:
        TraceError: if ``vocab_size`` is None and the maximum is unknown.
        UsageError: if ``vocab_size`` exceeds the maximum.
    """
    ranges = _IdRanges(program, ids)
    max_ids = _max_ids(ranges)
    if max_ids is None and vocab_size is None:
        raise _unknown(ranges.lookups(1), ids)
    if max_ids is not None and vocab_size is not None and vocab_size > max_ids:
        raise UsageError(
            f"--vocab-size must be at most the model's {max_ids} ids, got {vocab_size}.",
            f"Give {max_ids} or less.",
        )
    size = vocab_size or max_ids or 0
    names = program.graph_signature.inputs_to_parameters
    own = [x for x in ranges.lookups(size) if x.index.are_ids and (x.table or "") in names]
    smallest = min(own, key=lambda lookup: lookup.rows, default=None)
    return Vocabulary(size, names[smallest.table or ""] if smallest is not None else "")


def read_maximum(program: ExportedProgram, node: Node, extra: ExtraInput) -> int:
    """Return the largest integer that a program accepts for an extra input.

    ``extra`` has the maximum by ``--input``, or None for that of the tables.

    Raises:
        TraceError: if the maximum is not given and unknown.
        UsageError: if the given one exceeds the rows of a table.
    """
    max_ids = _max_ids(_IdRanges(program, node))
    if extra.maximum is None and max_ids is None:
        raise TraceError(
            f"Expected a lookup of the input {extra.name!r} in a table, got none, so its largest "
            "integer is unknown.",
            f"End its kind in :N for integers below N, as in --input {extra.name}=category:N.",
        )
    if max_ids is None or (extra.maximum is not None and extra.maximum < max_ids):
        assert extra.maximum is not None  # checked above
        return extra.maximum
    if extra.maximum is not None:
        raise UsageError(
            f"--input {extra.name} must be integers below {max_ids}, the rows of the model's "
            f"table, got {extra.maximum + 1}.",
            f"Give {max_ids} or less.",
        )
    return max_ids - 1


def _max_ids(ranges: _IdRanges) -> int | None:
    """Return the maximum number of ids for which every lookup has rows; None if it is unknown."""

    def fits(count: int) -> bool:
        return all(lookup.fits for lookup in ranges.lookups(count))

    if not ranges.lookups(1) or not fits(1):
        return None
    low, high = 1, MAX_IDS + 1  # fits(low) and not fits(high)
    if fits(MAX_IDS):
        return MAX_IDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _unknown(lookups: list[_Lookup], ids: Node) -> TraceError:
    blocks = [n.target for n in ids.users if isinstance(n.target, HigherOrderOperator)]
    if blocks and not lookups:
        name = str(blocks[0]).removeprefix("wrap_with_")
        return TraceError(
            "Expected a lookup of input_ids in the forward itself, got one inside a block of "
            f"its forward: {name}.",
            "Remove blocks such as torch.autocast from forward; choose the type of products by "
            "--precision.",
        )
    if not lookups:
        return TraceError(
            "Expected a model that looks its input_ids up in an embedding, got none.",
            f"Export models whose first step is an nn.Embedding of input_ids, or {_GIVE}. A model "
            "of features needs --features N.",
        )
    rows = min(lookup.rows for lookup in lookups if not lookup.fits)
    return TraceError(
        "Expected a lookup of input_ids themselves, got one of numbers computed from them, whose "
        f"range against the {rows} rows is unknown.",
        f"{_GIVE[0].upper()}{_GIVE[1:]}.",
    )


def _lookups(known: KnownRanges, node: Node) -> Iterator[_Lookup]:
    name = operator_name(node).rstrip("_")
    for table, axis, index in _places(node, name):
        numbers = known.of(index)
        if not numbers.of_ids or _is_bool(index):
            continue
        value = table.meta.get("val") if isinstance(table, Node) else None
        rows = value.shape[axis] if isinstance(value, Tensor) and value.dim() else table
        if isinstance(rows, int) and rows >= 0:
            table_name = table.name if isinstance(table, Node) else None
            yield _Lookup(table_name, rows, numbers, name in ("index", "index_put"))


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
