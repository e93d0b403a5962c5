"""The ranges of the integers that a captured program computes.

Ranges are followed through operators that move, join and compute integers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from aftexport.system.internals.torch_operators import pytree


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
