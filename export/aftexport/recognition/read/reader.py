"""The reader, which turns a value of an ONNX graph into a formula over given axes.

It reads backwards from the value. Transposes, reshapes and broadcasts only rearrange axes, a
product of tensors becomes a sum over the contracted axis, and a softmax becomes exponentials.
``formulas`` has the function of each operator. Inputs, linear layers, norms and all other values
at which reading ends become leaves.

The horizon keeps a formula small for any graph. A formula is a tree, and a graph is not: the
formula of a chain of products of activations doubles with each product. The values above the one
that is read are therefore visited level by level, where the level of a value is the longest path to
it. Once reads are many more than values, all values beyond are leaves. A value is the same leaf
wherever it is used.
"""

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.algebra import add, has_window
from aftexport.recognition.graph.shape_probe import ProbedGraph, depends_on_inputs
from aftexport.recognition.terms import (
    Axis,
    Count,
    Dims,
    Exp,
    Function,
    Indicator,
    Leaf,
    Max,
    Part,
    Product,
    Unreadable,
    as_product,
    fresh,
    number,
)

ELEMENTWISE = frozenset({
    "Abs", "Ceil", "Celu", "Clip", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mod", "Pow", "Relu", "Round",
    "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh",
    "ThresholdedRelu",
})  # fmt: skip
"""Elementwise operators on numbers, with broadcasting."""
_PRODUCTS = ("MatMul", "Gemm", "Einsum")
_READ_IF_WEIGHTS = ("Conv", "Gather", "GatherND", "Pad")
"""Operators that are leaves unless their input ``is_of_weights``."""
_READ_FIRST_INPUT = frozenset((
    "CumSum", "Expand", "Flatten", "Gather", "GatherND", "Pad", "ReduceLogSumExp", "ReduceMax",
    "ReduceMean", "ReduceSum", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Trilu",
    "Unsqueeze",
))  # fmt: skip
"""Operators whose other inputs are parameters and are not read."""
_READ_TWICE = ("LogSoftmax", "Slice", "Softmax")
"""Operators whose formula reads the first input twice."""


class Reader:
    """A reader of one value and the values that it is computed from, in an unchanged graph."""

    def __init__(
        self,
        probed: ProbedGraph,
        # The formula of each standard operator, by its ONNX name.
        formulas: "Mapping[str, Formula]",
        nodes: Iterable[ir.Node] = (),
        # The elementwise operators that are read; values of others are leaves.
        functions: Collection[str] = ELEMENTWISE,
    ) -> None:
        """Make a reader that has read nothing."""
        self.probed = probed
        self._formulas, self._functions = formulas, functions
        self.maxima: list[Max] = []  # all that were read; a match must account for each
        self.ends: dict[ir.Value, None] = {}  # the tensors at which reading ended
        self.parts: dict[Axis, Part] = {}  # what is read of some axes
        self.shapes: list[tuple[ir.Value, Dims]] = []  # operands of reshapes, with resulting dims
        # Whether a quotient is filled with 0, as a softmax is where no key counts.
        self.fills_weights = False
        self._of_weights: dict[ir.Value, tuple[bool, bool]] = {}
        self._shapes: dict[ir.Value, list[tuple[int, ...]]] = {}
        self._linear: dict[ir.Node, bool] = {}
        self._positions: dict[ir.Value, int] = {}
        self._within: set[ir.Value] | None = None
        for position, node in enumerate(nodes):
            self._positions.update(dict.fromkeys(node.outputs, position))
            # In order of the graph, so that each node only needs results that are known.
            for value in self._decisive(node):
                self._weights(value)

    def blank_copy(self) -> "Reader":
        """Return a reader that has read nothing, and shares the knowledge of the graph."""
        reader = Reader(self.probed, self._formulas, functions=self._functions)
        reader._of_weights, reader._positions = self._of_weights, self._positions
        reader._shapes, reader._linear = self._shapes, self._linear
        return reader

    def copy(self) -> "Reader":
        """Return an independent reader that has read the same."""
        reader = self.blank_copy()
        reader.maxima, reader.ends, reader.parts = [*self.maxima], {**self.ends}, {**self.parts}
        reader.shapes, reader.fills_weights = [*self.shapes], self.fills_weights
        reader._within = self._within
        return reader

    def read_output(self, value: ir.Value) -> tuple[Product, Dims]:
        """Read a value with a new axis for every dim; raises Unreadable."""
        dims = self.new_dims(value)
        return self.read(value, dims), dims

    def new_dims(self, value: ir.Value) -> Dims:
        """Return a new axis for every dim of a value."""
        return tuple(fresh(sizes) for sizes in self.shape(value))

    def shape(self, value: ir.Value) -> list[tuple[int, ...]]:
        """Return the sizes of every dim; raises Unreadable if they are not known."""
        if value not in self._shapes:
            shapes = self.probed.shapes(value)
            if shapes is None or len({len(shape) for shape in shapes}) != 1:
                raise Unreadable(f"the shape of {value.name} is not known")
            self._shapes[value] = [tuple(sizes) for sizes in zip(*shapes, strict=True)]
        return self._shapes[value]

    def read(self, value: ir.Value, dims: Dims, *, through_linear: bool = False) -> Product:
        """Read a value as a formula; values beyond the ``horizon`` of the first read are leaves.

        If ``through_linear``, a linear layer that computes ``value`` is read too.

        Raises:
            Unreadable: if there is no formula, as for a reshape that splits a dim unevenly.
        """
        array = self.probed.constant(value)
        fixed = self.probed.number(value)
        if fixed is not None:
            return number(fixed)
        if array is not None and array.size == 1 and array.dtype.kind in "iub":
            return number(float(array.reshape(())))
        node = value.producer()
        if array is not None:
            return self.leaf(value, dims)
        if (sizes := self.probed.size(value)) is not None:
            return as_product(Count(Axis(sizes), value))
        if self._within is None:
            self._within = self._horizon(value, through_linear=through_linear)
        if node is None or node.domain not in ("", "ai.onnx") or value not in self._within:
            return self._end(value, dims)
        if node.op_type in _PRODUCTS and not depends_on_inputs(value):
            # Factors of a position bias have a sum that is not over tokens.
            return self._end(value, dims)
        if node.op_type in (*_PRODUCTS, "Add") and self._is_linear(node):
            if not through_linear:
                return self._end(value, dims)
            if node.op_type == "Add":
                return add(self.arguments(node, dims, through_linear=True), value, dims)
        formula = self._formulas.get(node.op_type)
        if formula is not None and value is node.outputs[0]:
            product = formula(self, node, dims)
            return product if product is not None else self._end(value, dims)
        if node.op_type in self._functions:
            return as_product(Function(_named(node), self.arguments(node, dims), value, dims))
        return self._end(value, dims)

    def _horizon(self, value: ir.Value, *, through_linear: bool) -> set[ir.Value]:
        def above(of: ir.Value, level: int) -> list[tuple[ir.Value, int]]:
            node = of.producer()
            known = node is not None and (
                node.op_type in self._formulas or node.op_type in self._functions
            )
            if node is None or not known:
                return []
            # A linear layer is up to two nodes.
            if not (through_linear and level < 2) and self._is_end(node):
                return []
            uses = 2 if node.op_type in _READ_TWICE else 1
            inputs = node.inputs[:1] if node.op_type in _READ_FIRST_INPUT else node.inputs
            return [(v, uses) for v in inputs if v is not None]

        return {value} | within_horizon(value, self._positions, above)

    def _is_end(self, node: ir.Node) -> bool:
        """Return whether reading ends at a node because of its inputs."""
        try:
            if node.op_type in (*_PRODUCTS, "Add"):
                return self._is_linear(node)
            if node.op_type not in _READ_IF_WEIGHTS or node.op_type == "Pad":
                return False
            return not self.is_of_weights(self.input(node, 0))
        except Unreadable:
            return True

    def _decisive(self, node: ir.Node) -> list[ir.Value]:
        """Return the inputs that decide whether a node is read."""
        inputs = [v for v in node.inputs[:2] if v is not None]
        if node.op_type in _READ_IF_WEIGHTS:
            inputs = inputs[:1]
        elif node.op_type not in _PRODUCTS:
            return []
        computed = [v for v in inputs if self.probed.constant(v) is None]
        is_one = len(computed) == 1 and self.probed.is_float(computed[0])
        return computed if is_one and node.domain in ("", "ai.onnx") else []

    def leaf(self, value: ir.Value, dims: Dims) -> Product:
        """Return a value as a leaf that is not read further."""
        return as_product(
            Indicator(value, dims) if self.probed.is_boolean(value) else Leaf(value, dims)
        )

    def _end(self, value: ir.Value, dims: Dims) -> Product:
        if depends_on_inputs(value) and not self.probed.is_boolean(value):
            self.ends[value] = None
        return self.leaf(value, dims)

    def input(self, node: ir.Node, index: int) -> ir.Value:
        """Return an input of a node; raises Unreadable if the node lacks it."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            raise Unreadable(f"{node.op_type} has no input {index}")
        return value

    def arguments(
        self, node: ir.Node, dims: Dims, *, through_linear: bool = False
    ) -> tuple[Product, ...]:
        """Read all inputs of a node, each broadcast to ``dims``."""
        inputs = (v for v in node.inputs if v is not None)
        return tuple(self.broadcast(v, dims, through_linear=through_linear) for v in inputs)

    def broadcast(self, value: ir.Value, dims: Dims, *, through_linear: bool = False) -> Product:
        """Read a value whose dims, from the last, are ``dims`` or have size 1."""
        sizes = self.shape(value)
        if len(sizes) > len(dims):
            raise Unreadable(f"{value.name} has more dims than the result that it is broadcast to")
        own = dims[len(dims) - len(sizes) :]
        kept = (() if set(s) == {1} else axes for s, axes in zip(sizes, own, strict=True))
        return self.read(value, tuple(kept), through_linear=through_linear)

    def is_of_weights(self, value: ir.Value) -> bool:
        """Return whether a value is a product with exponentials, or windows of one."""
        return any(self._weights(value))

    def is_windowed(self, value: ir.Value) -> bool:
        """Return whether a value is windows of a product with exponentials."""
        return self._weights(value)[1]

    def _weights(self, value: ir.Value) -> tuple[bool, bool]:
        """Return whether a value is a product with exponentials, and whether windows of one."""
        if value not in self._of_weights:
            formula = self.blank_copy().read_separately(value)
            exponentials = any(isinstance(atom, Exp) for atom, _ in formula.factors)
            self._of_weights[value] = exponentials, has_window(formula)
        return self._of_weights[value]

    def read_separately(
        self, value: ir.Value, dims: Dims | None = None, parts: Mapping[Axis, Part] | None = None
    ) -> Product:
        """Read a value without effect on this reader; the result is 1 if there is no formula.

        The axes of ``dims`` occur nowhere else; new ones by default.
        """
        reader = self.blank_copy()
        reader.parts |= parts or {}
        # With a horizon of its own, each slice beyond this one would double the reads.
        reader._within = self._within
        try:
            return reader.read(value, reader.new_dims(value) if dims is None else dims)
        except Unreadable:
            return Product()

    def _is_linear(self, node: ir.Node) -> bool:
        """Return whether a node multiplies by learned weights, or adds a bias to such a product.

        A position bias of AFT is a constant matrix too, but is multiplied by exponentials.
        """
        if node not in self._linear:
            self._linear[node] = self._multiplies_by_weights(node)
        return self._linear[node]

    def _multiplies_by_weights(self, node: ir.Node) -> bool:
        if node.op_type == "Add":
            inputs = [v for v in node.inputs if v is not None]
            constants = [v for v in inputs if self.probed.constant(v) is not None]
            if len(constants) != 1 or len(self.shape(constants[0])) != 1:
                return False
            product = self.input(node, 1 if node.inputs[0] is constants[0] else 0).producer()
            return (
                product is not None
                and product.op_type in ("MatMul", "Einsum")
                and self._is_linear(product)
            )
        inputs = [v for v in node.inputs[:2] if v is not None]
        constants = [v for v in inputs if self.probed.constant(v) is not None]
        if len(inputs) != 2 or len(constants) != 1 or len(node.inputs) > 3:
            return False
        return not self.is_of_weights(inputs[1] if constants[0] is inputs[0] else inputs[0])


def _named(node: ir.Node) -> str:
    attributes: dict[str, Any] = {name: a.value for name, a in sorted(node.attributes.items())}
    return node.op_type + (str(attributes) if attributes else "")


def axis_index(axis: int, rank: int) -> int:
    """Return an axis that may be counted from the last one; raises Unreadable for a scalar."""
    if rank == 0:
        raise Unreadable("an axis is taken of a scalar")
    return axis % rank


def scalar(array: NDArray[np.generic]) -> Any:
    """Return the one entry of an array; raises Unreadable where there is another number."""
    if array.size != 1:
        raise Unreadable(f"one number is expected where an input has {array.size}")
    return array.reshape(()).item()


Formula = Callable[[Reader, ir.Node, Dims], Product | None]
"""A function from the reader, a node and the axes of its output to a formula.

It returns None for a node that is to stay a leaf.
"""


Above = Callable[[ir.Value, int], Iterable[tuple[ir.Value, int]]]
"""The values that reading a value at a level reads, and the number of times."""

MAX_LEVELS = 64
"""The most levels; the mechanisms have 25, or one for each key of a window."""
MAX_VALUES = 2048
"""The most values that one formula is read from."""
MAX_READS = 256
"""The most reads for one formula of few values; the mechanisms take 170."""
READS_PER_VALUE = 8


def within_horizon(
    value: ir.Value, positions: Mapping[ir.Value, int], above: Above
) -> set[ir.Value]:
    """Return the values that reading ``value`` looks into, including itself.

    ``positions`` has the place in the graph of the node that each value comes from, and ``above``
    returns the values that a value is read from.
    """
    levels: dict[ir.Value, int] = {value: 0}
    times: dict[ir.Value, int] = {value: 1}
    order = itertools.count()
    # The last values of the graph first, so that all readers of a value come before it.
    pending = [(0, next(order), value)]
    costs: dict[int, tuple[int, list[ir.Value]]] = {}
    seen = 0
    while pending and seen < MAX_VALUES:
        _, _, last = heapq.heappop(pending)
        level, count = levels[last], times[last]
        if level > MAX_LEVELS or count > MAX_READS + READS_PER_VALUE * MAX_VALUES:
            continue
        seen += 1
        reads, members = costs.setdefault(level, (0, []))
        members.append(last)
        from_above = list(above(last, level))
        costs[level] = reads + count * sum(uses for _, uses in from_above), members
        for source, uses in from_above:
            if source not in positions:
                continue
            if source not in levels:
                levels[source], times[source] = 0, 0
                heapq.heappush(pending, (-positions[source], next(order), source))
            levels[source] = max(levels[source], level + 1)
            times[source] += uses * count
    return _nearest(costs)


def _nearest(costs: Mapping[int, tuple[int, list[ir.Value]]]) -> set[ir.Value]:
    """Return the values of the levels whose reads are few enough, and of the first level."""
    near: set[ir.Value] = set()
    total = 0
    for level in sorted(costs):
        reads, members = costs[level]
        total += reads
        if level and total > max(MAX_READS, READS_PER_VALUE * (len(near) + len(members))):
            break
        near.update(members)
    return near
