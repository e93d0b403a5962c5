"""The number of token ids that a captured program accepts.

The ranges of integers are followed through operators that move, join and compute them.
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

from aftexport.errors import TraceError, UsageError
from aftexport.extra_inputs import ExtraInput
from aftexport.system.contract import MAX_VOCABULARY
from aftexport.system.internals.torch_operators import HigherOrderOperator, pytree


@dataclass(frozen=True)
class Range:
    """The possible numbers of a tensor."""

    low: float = -inf  # both infinite if unknown
    high: float = inf
    of_ids: bool = False  # whether the bounds depend on the number of ids
    # Whether the numbers are ids themselves, possibly with constants among them.
    are_ids: bool = False

    def joined(self, other: "Range") -> "Range":
        """Return the smallest range with the numbers of both."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Range(low, high, self.of_ids or other.of_ids, self.are_ids or other.are_ids)

    @property
    def is_known(self) -> bool:
        """True if both bounds are known."""
        return -inf < self.low and self.high < inf


def range_of(tensor: object) -> Range:
    """Return the range of a tensor of integers; an unbounded range for other objects."""
    is_whole = isinstance(tensor, Tensor) and tensor.dtype in _INTEGERS and not tensor.is_meta
    if not is_whole or not isinstance(tensor, Tensor) or not tensor.numel():
        return Range()
    return Range(int(tensor.min()), int(tensor.max()))


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class KnownRanges(dict[Node, Range]):
    """Ranges of nodes; a write into a view changes the ranges of all views of its tensor."""

    def __init__(self, constants: Mapping[Node, Range]) -> None:
        super().__init__(constants)
        self._views: dict[Node, set[Node]] = {}

    def of(self, argument: Any) -> Range:
        """Return the range of an argument; for a list, the range of all its parts."""
        if isinstance(argument, list | tuple):
            return reduce(Range.joined, map(self.of, argument)) if argument else Range()
        if isinstance(argument, Node):
            return self.get(argument, Range())
        if isinstance(argument, bool | int | float):
            return Range(argument, argument)
        return Range()

    def add(self, node: Node) -> None:
        """Compute and store the range of a node."""
        name = operator_name(node)
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


def operator_name(node: Node) -> str:
    """Return the name of a node's operator, such as ``add_`` for ``aten.add_.Tensor``."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", getattr(target, "__name__", target))
    return str(packet).rpartition(".")[2]


def _compute(known: KnownRanges, node: Node, name: str) -> Range:
    arguments = [known.of(a) for a in pytree.tree_leaves((node.args, node.kwargs))]
    if not any(a.of_ids for a in arguments) and name not in _JOINED and name not in _CONSTANTS:
        return known.of(node.args[0]) if name in _MOVES and node.args else Range()
    if name == "getitem":
        is_place = isinstance(node.args[0], Node) and operator_name(node.args[0]) in _WITH_PLACES
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


def _in_type(node: Node, computed: Range) -> Range:
    """Return a computed range as the type of the result holds it, after overflow or rounding."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return computed
    if value.dtype == torch.bool:
        return Range(0, 1)
    if value.dtype in _INTEGERS:
        limits = torch.iinfo(value.dtype)
        fits = limits.min <= computed.low and computed.high <= limits.max
        return (
            computed if fits or not computed.of_ids else Range(limits.min, limits.max, of_ids=True)
        )
    if value.is_floating_point():
        fits = max(-computed.low, computed.high) <= 2 / torch.finfo(value.dtype).eps
        return computed if fits else Range(of_ids=computed.of_ids)
    return Range(of_ids=computed.of_ids)


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
"""Operators that return numbers of their first argument."""
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
"""Operators that return numbers of the arguments at these positions."""
_WITH_PLACES = ("sort", "topk", "max", "min", "cummax", "cummin", "median", "mode", "kthvalue")
EMBEDDINGS = ("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
_INDEPENDENT = (
    *("argmax", "argmin", "argsort", "nonzero", "searchsorted", "bucketize"),
    *("size", "numel", "sym_size", "sym_numel", "sym_stride", "one_hot", *EMBEDDINGS),
)
"""Operators that return places, sizes or numbers of a table, for any number of ids."""


def _padded(known: KnownRanges, node: Node) -> Range:
    mode = node.args[2] if operator_name(node) == "pad" and len(node.args) > 2 else "constant"
    value = node.args[-1] if len(node.args) > (3 if operator_name(node) == "pad" else 2) else 0
    data = known.of(node.args[0])
    return data.joined(known.of(value or 0)) if mode == "constant" else data


def _filled(known: KnownRanges, node: Node, value: float | None = None) -> Range:
    return known.of(node.args[1]) if value is None else Range(value, value)


def _triangle(known: KnownRanges, node: Node) -> Range:
    return known.of(node.args[0]).joined(Range(0, 0))


_CONSTANTS: dict[str, Callable[[KnownRanges, Node], Range]] = {
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
"""Operators that return constants, possibly together with numbers of an argument."""


def _combined(
    compute: Callable[[float, float], float],
    known: KnownRanges,
    node: Node,
    *,
    scaled: bool = False,
) -> Range:
    """Return the range of an operator that is monotone in both arguments."""
    a, b = known.of(node.args[0]), known.of(node.args[1])
    if scaled and "alpha" in node.kwargs:
        return Range(of_ids=True)
    ends = [compute(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    if any(map(isnan, ends)):
        return Range(of_ids=True)
    return Range(min(ends), max(ends), of_ids=True)


def _product(known: KnownRanges, node: Node) -> Range:
    a, b = known.of(node.args[0]), known.of(node.args[1])
    for ids, mask in ((a, b), (b, a)):
        if ids.are_ids and (mask.low, mask.high) == (0, 1):
            return ids.joined(Range(0, 0))
    return _combined(lambda x, y: x * y, known, node)


def _clamped(known: KnownRanges, node: Node, *, only: str = "") -> Range:
    data = known.of(node.args[0])
    bounds = dict(zip([only] if only else ["min", "max"], node.args[1:], strict=False))
    bounds = {**bounds, **{k: v for k, v in node.kwargs.items() if v is not None}}
    low, high = data.low, data.high
    if bounds.get("min") is not None:
        bound = known.of(bounds["min"])
        low, high = max(low, bound.low), max(high, bound.high)
    if bounds.get("max") is not None:
        bound = known.of(bounds["max"])
        low, high = min(low, bound.low), min(high, bound.high)
    return replace(data, low=low, high=high)


def _remainder(known: KnownRanges, node: Node) -> Range:
    data, divisor = known.of(node.args[0]), known.of(node.args[1])
    if not (divisor.low >= 1 and divisor.is_known):
        return Range(of_ids=True)
    if data.low >= 0 and data.high < divisor.low:
        return Range(data.low, data.high, of_ids=True)
    low = 0 if operator_name(node).startswith("remainder") or data.low >= 0 else 1 - divisor.high
    return Range(low, divisor.high - 1, of_ids=True)


def _quotient(known: KnownRanges, node: Node) -> Range:
    data, divisor = known.of(node.args[0]), known.of(node.args[1])
    is_whole = "floor" in (operator_name(node).split("_")[0], node.kwargs.get("rounding_mode"))
    if not is_whole or not data.is_known or not divisor.is_known or divisor.low < 1:
        return Range(of_ids=True)
    ends = [x // y for x in (data.low, data.high) for y in (divisor.low, divisor.high)]
    return Range(min(ends), max(ends), of_ids=True)


def _masked_bits(known: KnownRanges, node: Node) -> Range:
    positive = [r for r in map(known.of, node.args[:2]) if r.low >= 0]
    return Range(0, min((r.high for r in positive), default=inf), of_ids=True)


def _magnitude(known: KnownRanges, node: Node) -> Range:
    data = known.of(node.args[0])
    return Range(max(0, data.low, -data.high), max(data.high, -data.low), of_ids=True)


_COMPUTED: dict[str, Callable[[KnownRanges, Node], Range]] = {
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
"""Operators that compute new numbers from their arguments."""


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
