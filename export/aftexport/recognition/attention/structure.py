"""The nodes of softmax attention in a graph, from the product of its scores to that of its values.

    scores = cap(scale query key^T), then masks and biases by Add and Where, then Softmax

Masks stay values here: ``masks`` evaluates them.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from aftexport.recognition.graph.shape_probe import ProbedGraph, any_above
from aftexport.recognition.patterns.pattern import NearMissFound
from aftexport.system.contract import LENGTHS

_RESHAPES = ("Expand", "Flatten", "Reshape", "Squeeze", "Unsqueeze")
"""Operators that may change the axes before the last two."""
_SAME = ("Cast", "Identity")
_LOWEST = -1e30
"""The number below which a lower bound of the scores has no effect."""


@dataclass(frozen=True)
class Mask:
    """A value that is added to the scores, or a condition with a number where it is false."""

    value: ir.Value
    kind: Literal["added", "kept", "hidden"]  # hidden: the scores count where it is false
    number: float  # the factor of an added value, or the score where a condition hides a key
    where: ir.Value  # the scores with the mask, for their shape


@dataclass
class Attention:
    """The nodes of one attention."""

    softmax: ir.Node
    product: ir.Node  # the product of queries and keys
    output: ir.Node  # the product of weights and values
    scale: float
    softcap: float
    masks: list[Mask]
    sink: ir.Value | None  # a column of the scores without a value


class Content:
    """The values that depend on the content of documents, and not only on sizes and lengths."""

    def __init__(self) -> None:
        self._known: MutableMapping[ir.Value, bool] = {}

    def has(self, value: ir.Value) -> bool:
        """Return whether a value depends on an input other than the lengths."""
        return any_above(value, self._known, _is_content)


def _is_content(value: ir.Value) -> bool | None:
    node = value.producer()
    if node is None:
        return value.is_graph_input() and value.name != LENGTHS
    return False if node.op_type in ("Shape", "Size") else None


def attention_of(softmax: ir.Node, probed: ProbedGraph, content: Content) -> Attention | None:
    """Return the attention whose weights a node Softmax computes; None for any other softmax.

    Raises:
        NearMissFound: if it is attention of another form.
    """
    rank = len((probed.shapes(softmax.outputs[0]) or [()])[0])
    logits = softmax.inputs[0]
    if logits is None or softmax.attributes.get_int("axis", -1) not in (-1, rank - 1):
        return None
    reader = _Scores(probed, content)
    product = reader.read(logits)
    if product is None or not is_product_of_tokens(product, probed):
        return None
    if reader.reason:
        raise NearMissFound(reader.reason)
    output = _output(softmax, reader.sink is not None, probed)
    if output is None:
        return None
    softcap = reader.softcap
    scale = reader.factor * softcap if softcap else reader.factor
    return Attention(softmax, product, output, scale, softcap, reader.masks, reader.sink)


@dataclass
class _Scores:
    """The reader of what stands between the product of queries and keys and the softmax."""

    probed: ProbedGraph
    content: Content
    factor: float = 1.0
    softcap: float = 0.0
    sink: ir.Value | None = None
    masks: list[Mask] = field(default_factory=list)
    reason: str = ""  # why the scores are of another form

    def read(self, logits: ir.Value) -> ir.Node | None:
        """Return the product; None without one."""
        value: ir.Value | None = logits
        while value is not None and (node := value.producer()) is not None:
            if node.op_type == "MatMul":
                return node
            step = _STEPS.get(node.op_type)
            value = step(self, node) if step is not None else None
        return None

    def same(self, node: ir.Node) -> ir.Value | None:
        return node.inputs[0]

    def reshaped(self, node: ir.Node) -> ir.Value | None:
        before = self.probed.shapes(node.inputs[0])
        after = self.probed.shapes(node.outputs[0])
        if before is None or after is None:
            return None
        is_kept = all(b[-2:] == a[-2:] for b, a in zip(before, after, strict=True))
        is_whole = all(np.prod(b) == np.prod(a) for b, a in zip(before, after, strict=True))
        return node.inputs[0] if is_kept and is_whole else None

    def scaled(self, node: ir.Node) -> ir.Value | None:
        first, second = node.inputs[:2]
        if first is None or second is None:
            return None
        number = self.probed.number(second)
        if number is None and node.op_type == "Mul":
            first, number = second, self.probed.number(first)
        if number is None or not number:
            return None
        self.factor *= number if node.op_type == "Mul" else 1 / number
        return first

    def capped(self, node: ir.Node) -> ir.Value | None:
        if self.softcap:
            return None
        self.softcap, self.factor = abs(self.factor), 1.0
        return node.inputs[0]

    def added(self, node: ir.Node) -> ir.Value | None:
        first, second = node.inputs[:2]
        if first is None or second is None:
            return None
        if node.op_type == "Sub" and _is_largest_of(second, first):
            return first  # the softmax is the same without the largest score
        factor = self.factor if node.op_type == "Add" else -self.factor
        of_content = [v for v in (first, second) if self.content.has(v)]
        if len(of_content) > 1:
            scores = self._of_product(first, second)
            if scores is not None:
                added = second if scores is first else first
                self._refuse(f"{added.name} is added to its scores and depends on the inputs")
            return scores
        (scores,) = of_content or (None,)
        if scores is None or (node.op_type == "Sub" and scores is second):
            return None
        self._mask(Mask(second if scores is first else first, "added", factor, node.outputs[0]))
        return scores

    def chosen(self, node: ir.Node) -> ir.Value | None:
        condition, yes, no = node.inputs
        if condition is None or yes is None or no is None:
            return None
        below = [self.probed.number(value) for value in (yes, no)]
        if (below[0] is None) == (below[1] is None):
            return None
        number = below[0] if below[1] is None else below[1]
        assert number is not None
        if self.content.has(condition):
            self._refuse(f"its mask {condition.name} depends on the inputs")
        kind: Literal["kept", "hidden"] = "kept" if below[0] is None else "hidden"
        self._mask(Mask(condition, kind, number * self.factor, node.outputs[0]))
        return yes if below[0] is None else no

    def bounded(self, node: ir.Node) -> ir.Value | None:
        values = [v for v in node.inputs if v is not None]
        numbers = [self.probed.number(v) for v in values]
        others = [v for v, n in zip(values, numbers, strict=True) if n is None]
        is_low = all(n is None or n <= _LOWEST for n in numbers)
        return others[0] if is_low and len(others) == 1 else None

    def joined(self, node: ir.Node) -> ir.Value | None:
        """Read a column that is joined to the scores as a sink."""
        shapes = self.probed.shapes(node.outputs[0])
        if shapes is None or len(node.inputs) != 2 or self.sink is not None or self.masks:
            return None
        scores, sink = node.inputs
        if node.attributes.get_int("axis", 0) not in (-1, len(shapes[0]) - 1):
            return None
        widths = {shape[-1] for shape in self.probed.shapes(sink) or [(0,)]}
        if widths != {1} or scores is None or sink is None or self.factor != 1:
            return None
        self.sink = sink
        return scores

    def _mask(self, mask: Mask) -> None:
        self.masks.append(mask)
        if self.softcap:
            self._refuse("its mask comes before the bound of its scores")

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _of_product(self, *values: ir.Value) -> ir.Value | None:
        """Return the value that further nodes compute from a product, and not the others."""
        for value in values:
            copy = _Scores(self.probed, self.content)
            product = copy.read(value)
            if product is not None and is_product_of_tokens(product, self.probed):
                return value
        return None


_STEPS: dict[str, Callable[[_Scores, ir.Node], ir.Value | None]] = {
    **dict.fromkeys(_SAME, _Scores.same),
    **dict.fromkeys(_RESHAPES, _Scores.reshaped),
    **dict.fromkeys(("Mul", "Div"), _Scores.scaled),
    **dict.fromkeys(("Add", "Sub"), _Scores.added),
    "Concat": _Scores.joined,
    "Max": _Scores.bounded,
    "Tanh": _Scores.capped,
    "Where": _Scores.chosen,
}


def _is_largest_of(value: ir.Value, scores: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "ReduceMax" and node.inputs[0] is scores


def is_product_of_tokens(product: ir.Node, probed: ProbedGraph) -> bool:
    """Return whether a product is of two computed values, and both its last axes are dynamic."""
    if any(v is None or v.const_value is not None for v in product.inputs):
        return False
    shapes = probed.shapes(product.outputs[0])
    return shapes is not None and all(
        len(shapes[0]) > 2 and len({shape[axis] for shape in shapes}) > 1 for axis in (-1, -2)
    )


def _output(softmax: ir.Node, has_sink: bool, probed: ProbedGraph) -> ir.Node | None:
    """Return the product of the weights and the values; None if the weights are for other uses.

    Raises:
        NearMissFound: if the weights have other readers too.
    """
    value = softmax.outputs[0]
    while True:
        readers = {user for user, _ in value.uses()}
        guards = {user for user in readers if user.op_type == "IsNaN"}
        readers -= guards
        if value.is_graph_output() or len(readers) > 1:
            if any(reader.op_type == "MatMul" for reader in readers):
                raise NearMissFound("its weights have other readers than the product with values")
            return None
        if not readers:
            return None
        (node,) = readers
        if node.op_type == "MatMul":
            return node if node.inputs[0] is value else None
        if node.op_type == "Slice" and has_sink:
            has_sink = False
        elif node.op_type in _RESHAPES:
            if not _keeps_rows(node, probed):
                return None
        elif node.op_type == "Where":
            if not _replaces_empty_rows(node, value, softmax, guards):
                return None
        elif node.op_type not in (*_SAME, "Dropout"):
            return None
        value = node.outputs[0]


def _keeps_rows(node: ir.Node, probed: ProbedGraph) -> bool:
    before, after = (probed.shapes(value) for value in (node.inputs[0], node.outputs[0]))
    return (
        before is not None
        and after is not None
        and all(
            b[-2:] == a[-2:] and np.prod(b) == np.prod(a)
            for b, a in zip(before, after, strict=True)
        )
    )


def _replaces_empty_rows(
    node: ir.Node, weights: ir.Value, softmax: ir.Node, guards: set[ir.Node]
) -> bool:
    """Return whether a node gives other weights only to rows that see no key."""
    condition = node.inputs[0].producer() if node.inputs[0] is not None else None
    if condition is None or node.inputs[2] is not weights:
        return False
    if condition in guards:
        return True
    largest = condition.inputs[0].producer() if condition.inputs[0] is not None else None
    return (
        condition.op_type == "Equal"
        and largest is not None
        and largest.op_type == "ReduceMax"
        and largest.inputs[0] is softmax.inputs[0]
    )
