"""Which rows of tables a captured program reads for token ids below a bound.

Integers are followed as ranges, through what moves, joins and computes them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Range:
    """What the numbers of a tensor can be.

    Attributes:
        low, high: the smallest and the largest; infinite where that is not known.
        of_ids: whether these depend on how many ids there are.
        are_ids: whether the numbers are ids themselves, and constants between them.
    """

    low: float = -inf
    high: float = inf
    of_ids: bool = False
    are_ids: bool = False

    def joined(self, other: "Range") -> "Range":
        """What the numbers of either can be."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Range(low, high, self.of_ids or other.of_ids, self.are_ids or other.are_ids)

    @property
    def is_known(self) -> bool:
        """Whether it has both bounds."""
        return -inf < self.low and self.high < inf


@dataclass(frozen=True)
class Lookup:
    """Rows of a table that are read by numbers computed from ids.

    Attributes:
        table: name of the table's node; None where there is none, as for ``one_hot``.
        rows: how many it has.
        index: the range of the numbers.
        is_signed: whether negative numbers count rows from the end.
    """

    table: str | None
    rows: int
    index: Range
    is_signed: bool

    @property
    def fits(self) -> bool:
        """Whether every number has a row."""
        lowest = -self.rows if self.is_signed else 0
        return lowest <= self.index.low and self.index.high < self.rows


class IdRanges:
    """What a program computes of its ids, as far as these are integers."""

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
            node: _range_in(tensors.get(names.get(node.name, "")))
            for node in self._nodes
            if node.op == "placeholder"
        }

    def lookups(self, count: int) -> list[Lookup]:
        """Every lookup by what is computed from ids, where these are below ``count``."""
        found: list[Lookup] = []
        known = _Known(self._constants)
        known[self._ids] = Range(0, count - 1, of_ids=True, are_ids=True)
        for node in self._nodes:
            if node.op == "call_function":
                found += _lookups(known, node)
                known.add(node)
        return found


def _range_in(tensor: object) -> Range:
    is_whole = isinstance(tensor, Tensor) and tensor.dtype in _WHOLE and not tensor.is_meta
    if not is_whole or not isinstance(tensor, Tensor) or not tensor.numel():
        return Range()
    return Range(int(tensor.min()), int(tensor.max()))


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class _Known(dict[Node, Range]):
    """Ranges of nodes; those of views change with what is written into them."""

    def __init__(self, constants: Mapping[Node, Range]) -> None:
        super().__init__(constants)
        self._views: dict[Node, set[Node]] = {}

    def of(self, argument: Any) -> Range:
        """What an argument can be; of a list, what its parts can be."""
        if isinstance(argument, list | tuple):
            return reduce(Range.joined, map(self.of, argument)) if argument else Range()
        if isinstance(argument, Node):
            return self.get(argument, Range())
        if isinstance(argument, bool | int | float):
            return Range(argument, argument)
        return Range()

    def add(self, node: Node) -> None:
        """Works out what a node can be."""
        name = _name(node)
        self[node] = _in_type(node, _compute(self, node, name.rstrip("_")))
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or not (name.endswith("_") or name in _MOVES):
            return
        views = self._views.setdefault(source, {source})
        views.add(node)
        self._views[node] = views
        if name.endswith("_"):
            for view in views:
                self[view] = self[view].joined(self[node])


def _name(node: Node) -> str:
    """``add_`` of ``aten.add_.Tensor``."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", getattr(target, "__name__", target))
    return str(packet).rpartition(".")[2]


def _compute(known: _Known, node: Node, name: str) -> Range:
    arguments = [known.of(a) for a in tree_leaves((node.args, node.kwargs))]
    if not any(a.of_ids for a in arguments) and name not in _JOINED and name not in _CONSTANTS:
        return known.of(node.args[0]) if name in _MOVES and node.args else Range()
    if name == "getitem":
        is_place = isinstance(node.args[0], Node) and _name(node.args[0]) in _WITH_PLACES
        return Range() if is_place and node.args[1] == 1 else known.of(node.args[0])
    if name in _MOVES:
        return known.of(node.args[0])
    if name in _JOINED:
        return known.of([node.args[i] for i in _JOINED[name] if i < len(node.args)])
    if name in _CONSTANTS:
        return _CONSTANTS[name](known, node)
    if name in _COMPUTED:
        return _COMPUTED[name](known, node)
    return Range(of_ids=name not in _INDEPENDENT)


def _in_type(node: Node, found: Range) -> Range:
    """What fits the type of the result; a number that does not is another one there."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return found
    if value.dtype == torch.bool:
        return Range(0, 1)
    if value.dtype in _WHOLE:
        limits = torch.iinfo(value.dtype)
        fits = limits.min <= found.low and found.high <= limits.max
        return found if fits or not found.of_ids else Range(limits.min, limits.max, of_ids=True)
    if value.is_floating_point():
        fits = max(-found.low, found.high) <= 2 / torch.finfo(value.dtype).eps
        return found if fits else Range(of_ids=found.of_ids)
    return Range(of_ids=found.of_ids)


_MOVES = frozenset((
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "swapaxes",
    "permute", "t", "numpy_T", "expand", "expand_as", "broadcast_to", "contiguous", "clone",
    "detach", "alias", "lift_fresh", "lift_fresh_copy", "slice", "select", "narrow", "flip",
    "roll", "repeat", "repeat_interleave", "tile", "unfold", "chunk", "split",
    "split_with_sizes", "tensor_split", "unbind", "movedim", "to", "_to_copy", "type_as",
    "_unsafe_view", "view_as", "reshape_as", "masked_select", "gather", "index_select", "index",
    "take", "take_along_dim", "amax", "amin", "max", "min", "sort", "topk", "cummax", "cummin",
    "median", "mode", "diagonal", "rot90", "unsafe_chunk", "unsafe_split", "as_strided",
    "kthvalue",
))  # fmt: skip
"""Operators whose numbers are those of their first argument."""
_JOINED = {
    "cat": (0,),
    "concat": (0,),
    "stack": (0,),
    "hstack": (0,),
    "where": (1, 2),
    "masked_fill": (0, 2),
    "masked_scatter": (0, 2),
    "scatter": (0, 3),
    "index_put": (0, 2),
    "index_fill": (0, 3),
    "index_copy": (0, 3),
    "slice_scatter": (0, 1),
    "select_scatter": (0, 1),
    "copy": (1,),
    "fill": (1,),
}
"""Operators whose numbers are those of these arguments."""
_WITH_PLACES = ("sort", "topk", "max", "min", "cummax", "cummin", "median", "mode", "kthvalue")
_EMBEDDINGS = ("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
_INDEPENDENT = (
    *("argmax", "argmin", "argsort", "nonzero", "searchsorted", "bucketize"),
    *("size", "numel", "sym_size", "sym_numel", "sym_stride", "one_hot", *_EMBEDDINGS),
)
"""Operators whose numbers are places, sizes or a table's, however many ids there are."""


def _padded(known: _Known, node: Node) -> Range:
    mode = node.args[2] if _name(node) == "pad" and len(node.args) > 2 else "constant"
    value = node.args[-1] if len(node.args) > (3 if _name(node) == "pad" else 2) else 0
    data = known.of(node.args[0])
    return data.joined(known.of(value or 0)) if mode == "constant" else data


def _filled(known: _Known, node: Node, value: float | None = None) -> Range:
    return known.of(node.args[1]) if value is None else Range(value, value)


def _triangle(known: _Known, node: Node) -> Range:
    return known.of(node.args[0]).joined(Range(0, 0))


_CONSTANTS: dict[str, Callable[[_Known, Node], Range]] = {
    "pad": _padded,
    "constant_pad_nd": _padded,
    "tril": _triangle,
    "triu": _triangle,
    "full": _filled,
    "full_like": _filled,
    "zeros": partial(_filled, value=0),
    "zeros_like": partial(_filled, value=0),
    "new_zeros": partial(_filled, value=0),
    "ones": partial(_filled, value=1),
    "ones_like": partial(_filled, value=1),
    "new_ones": partial(_filled, value=1),
    "new_full": lambda known, node: known.of(node.args[2]),
    "scalar_tensor": lambda known, node: known.of(node.args[0]),
}
"""Operators that have numbers of their own."""


def _combined(
    compute: Callable[[float, float], float], known: _Known, node: Node, *, scaled: bool = False
) -> Range:
    """Of an operator that is monotone in both arguments."""
    a, b = known.of(node.args[0]), known.of(node.args[1])
    if scaled and "alpha" in node.kwargs:
        return Range(of_ids=True)
    ends = [compute(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    if any(map(isnan, ends)):
        return Range(of_ids=True)
    return Range(min(ends), max(ends), of_ids=True)


def _product(known: _Known, node: Node) -> Range:
    a, b = known.of(node.args[0]), known.of(node.args[1])
    for ids, mask in ((a, b), (b, a)):
        if ids.are_ids and (mask.low, mask.high) == (0, 1):
            return ids.joined(Range(0, 0))
    return _combined(lambda x, y: x * y, known, node)


def _clamped(known: _Known, node: Node, *, only: str = "") -> Range:
    data = known.of(node.args[0])
    bounds = dict(zip([only] if only else ["min", "max"], node.args[1:], strict=False))
    bounds = {**bounds, **{k: v for k, v in node.kwargs.items() if v is not None}}
    low, high = data.low, data.high
    if bounds.get("min") is not None:
        given = known.of(bounds["min"])
        low, high = max(low, given.low), max(high, given.high)
    if bounds.get("max") is not None:
        given = known.of(bounds["max"])
        low, high = min(low, given.low), min(high, given.high)
    return replace(data, low=low, high=high)


def _remainder(known: _Known, node: Node) -> Range:
    data, divisor = known.of(node.args[0]), known.of(node.args[1])
    if not (divisor.low >= 1 and divisor.is_known):
        return Range(of_ids=True)
    if data.low >= 0 and data.high < divisor.low:
        return Range(data.low, data.high, of_ids=True)
    low = 0 if _name(node).startswith("remainder") or data.low >= 0 else 1 - divisor.high
    return Range(low, divisor.high - 1, of_ids=True)


def _quotient(known: _Known, node: Node) -> Range:
    data, divisor = known.of(node.args[0]), known.of(node.args[1])
    is_whole = "floor" in (_name(node).split("_")[0], node.kwargs.get("rounding_mode"))
    if not is_whole or not data.is_known or not divisor.is_known or divisor.low < 1:
        return Range(of_ids=True)
    ends = [x // y for x in (data.low, data.high) for y in (divisor.low, divisor.high)]
    return Range(min(ends), max(ends), of_ids=True)


def _masked_bits(known: _Known, node: Node) -> Range:
    positive = [r for r in map(known.of, node.args[:2]) if r.low >= 0]
    return Range(0, min((r.high for r in positive), default=inf), of_ids=True)


def _magnitude(known: _Known, node: Node) -> Range:
    data = known.of(node.args[0])
    return Range(max(0, data.low, -data.high), max(data.high, -data.low), of_ids=True)


_COMPUTED: dict[str, Callable[[_Known, Node], Range]] = {
    "add": partial(_combined, lambda a, b: a + b, scaled=True),
    "sub": partial(_combined, lambda a, b: a - b, scaled=True),
    "rsub": partial(_combined, lambda a, b: b - a, scaled=True),
    "mul": _product,
    "remainder": _remainder,
    "fmod": _remainder,
    "floor_divide": _quotient,
    "div": _quotient,
    "minimum": partial(_combined, min),
    "maximum": partial(_combined, max),
    "bitwise_and": _masked_bits,
    "__and": _masked_bits,
    "clamp": _clamped,
    "clip": _clamped,
    "clamp_min": partial(_clamped, only="min"),
    "clamp_max": partial(_clamped, only="max"),
    "relu": lambda known, node: replace(
        known.of(node.args[0]), low=max(0, known.of(node.args[0]).low)
    ),
    "abs": _magnitude,
    "neg": lambda known, node: Range(
        -known.of(node.args[0]).high, -known.of(node.args[0]).low, of_ids=True
    ),
}
"""Operators that compute other numbers."""


def _lookups(known: _Known, node: Node) -> Iterator[Lookup]:
    name = _name(node).rstrip("_")
    for table, axis, index in _places(node, name):
        found = known.of(index)
        if not found.of_ids or _is_bool(index):
            continue
        value = table.meta.get("val") if isinstance(table, Node) else None
        rows = value.shape[axis] if isinstance(value, Tensor) and value.dim() else table
        if isinstance(rows, int) and rows >= 0:
            table_name = table.name if isinstance(table, Node) else None
            yield Lookup(table_name, rows, found, name in ("index", "index_put"))


def _places(node: Node, name: str) -> Iterator[tuple[Any, int, Any]]:
    """Table, axis of its rows and index of each lookup; of ``one_hot`` the number of classes."""
    args: Any = node.args
    if name in _EMBEDDINGS:
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
