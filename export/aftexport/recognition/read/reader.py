"""What a value of an ONNX graph is, as a formula over the axes it is asked for.

Reads backwards from a value: transposes, reshapes and broadcasts become which axis lies where,
every product of tensors becomes a sum over the axis it contracts, softmax becomes exponentials;
``formulas`` has what each operator is. Where reading ends (inputs, linear layers, norms, anything
else), a leaf stands.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.formula.algebra import add
from aftexport.recognition.formula.axes import Axis, Dims, Part, fresh
from aftexport.recognition.formula.terms import (
    Exp,
    Function,
    Indicator,
    Leaf,
    Max,
    Product,
    as_product,
    number,
)
from aftexport.recognition.formula.unreadable import Unreadable
from aftexport.recognition.formula.windows import has_window
from aftexport.recognition.graph.shape_probe import ProbedGraph, depends_on_inputs
from aftexport.recognition.read.horizon import within_horizon

ELEMENTWISE = frozenset({
    "Abs", "Ceil", "Celu", "Clip", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mod", "Pow", "Relu", "Round",
    "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh",
    "ThresholdedRelu",
})  # fmt: skip
"""Operators that give numbers of each entry alone, with broadcasting."""
_PRODUCTS = ("MatMul", "Gemm", "Einsum")
_READ_IF_WEIGHTS = ("Conv", "Gather", "GatherND", "Pad")
"""Operators whose formula depends on whether what they are of ``is_of_weights``."""
_READ_FIRST_INPUT = frozenset((
    "CumSum", "Expand", "Flatten", "Gather", "GatherND", "Pad", "ReduceLogSumExp", "ReduceMax",
    "ReduceMean", "ReduceSum", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Trilu",
    "Unsqueeze",
))  # fmt: skip
"""Operators whose other inputs say how, and are not read."""
_READ_TWICE = ("LogSoftmax", "Slice", "Softmax")
"""Operators whose formula reads the first input for itself and once more."""


class Reader:
    """Reads one value, and what it rests on, as formulas, while all that stays as it is.

    Attributes:
        measured: the graph's values.
        maxima: every maximum that was read; a match has to account for each.
        ends: the tensors at which reading ended.
        parts: axes of dims of which only a part is read.
        shapes: the shape operand of each reshape, with the resulting dims.
    """

    def __init__(
        self, probed: ProbedGraph, formulas: "Mapping[str, Formula]", nodes: Iterable[ir.Node] = ()
    ) -> None:
        """Make a reader that has read nothing.

        Args:
            measured: the graph's values.
            formulas: the formula of each standard operator, by its ONNX name.
            nodes: the nodes of the graph in its order; values of others are leaves.
        """
        self.probed = probed
        self._formulas = formulas
        self.maxima: list[Max] = []
        self.ends: dict[ir.Value, None] = {}
        self.parts: dict[Axis, Part] = {}
        self.shapes: list[tuple[ir.Value, Dims]] = []
        self._of_weights: dict[ir.Value, tuple[bool, bool]] = {}
        self._shapes: dict[ir.Value, list[tuple[int, ...]]] = {}
        self._linear: dict[ir.Node, bool] = {}
        self._positions: dict[ir.Value, int] = {}
        self._within: set[ir.Value] | None = None
        for position, node in enumerate(nodes):
            self._positions.update(dict.fromkeys(node.outputs, position))
            # From the first node on: each rests on what is known, and not on a chain of others.
            for value in self._decisive(node):
                self._weights(value)

    def blank_copy(self) -> "Reader":
        """One that has read nothing yet, but knows which values are of weights."""
        reader = Reader(self.probed, self._formulas)
        reader._of_weights, reader._positions = self._of_weights, self._positions
        reader._shapes, reader._linear = self._shapes, self._linear
        return reader

    def copy(self) -> "Reader":
        """One that has read the same, and goes on by itself."""
        reader = self.blank_copy()
        reader.maxima, reader.ends, reader.parts = [*self.maxima], {**self.ends}, {**self.parts}
        reader.shapes = [*self.shapes]
        reader._within = self._within
        return reader

    def read_output(self, value: ir.Value) -> tuple[Product, Dims]:
        """A value with an axis of its own for every dim; raises Unreadable."""
        dims = self.new_dims(value)
        return self.read(value, dims), dims

    def new_dims(self, value: ir.Value) -> Dims:
        """An axis for every dim of a value."""
        return tuple(fresh(sizes) for sizes in self.shape(value))

    def shape(self, value: ir.Value) -> list[tuple[int, ...]]:
        """The sizes of every dim; raises Unreadable where they were not measured."""
        if value not in self._shapes:
            shapes = self.probed.shapes(value)
            if shapes is None or len({len(shape) for shape in shapes}) != 1:
                raise Unreadable(f"the shape of {value.name} is not known")
            self._shapes[value] = [tuple(sizes) for sizes in zip(*shapes, strict=True)]
        return self._shapes[value]

    def read(self, value: ir.Value, dims: Dims, *, through_linear: bool = False) -> Product:
        """A value as a formula; what is beyond the ``horizon`` of the first is a leaf.

        Args:
            value: of the graph.
            dims: the axes of each of its dims.
            through_linear: do not stop at a linear layer that ``value`` comes from.

        Raises:
            Unreadable: where a reshape does not come apart into axes.
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
        if self._within is None:
            self._within = self._horizon(value, through_linear=through_linear)
        if node is None or node.domain not in ("", "ai.onnx") or value not in self._within:
            return self._end(value, dims)
        if node.op_type in _PRODUCTS and not depends_on_inputs(value):
            # As factors of a position bias, whose sum is over no tokens.
            return self._end(value, dims)
        if node.op_type in (*_PRODUCTS, "Add") and self._is_linear(node):
            if not through_linear:
                return self._end(value, dims)
            if node.op_type == "Add":
                return add(self.arguments(node, dims, through_linear=True), value, dims)
        formula = self._formulas.get(node.op_type)
        if formula is not None and value is node.outputs[0]:
            found = formula(self, node, dims)
            return found if found is not None else self._end(value, dims)
        if node.op_type in ELEMENTWISE:
            return as_product(Function(_named(node), self.arguments(node, dims), value, dims))
        return self._end(value, dims)

    def _horizon(self, value: ir.Value, *, through_linear: bool) -> set[ir.Value]:
        def above(of: ir.Value, level: int) -> list[tuple[ir.Value, int]]:
            node = of.producer()
            known = node is not None and (
                node.op_type in self._formulas or node.op_type in ELEMENTWISE
            )
            if node is None or not known:
                return []
            # A linear layer is up to two nodes.
            if not (through_linear and level < 2) and self._is_end(node):
                return []
            uses = 2 if node.op_type in _READ_TWICE else 1
            given = node.inputs[:1] if node.op_type in _READ_FIRST_INPUT else node.inputs
            return [(v, uses) for v in given if v is not None]

        return {value} | within_horizon(value, self._positions, above)

    def _is_end(self, node: ir.Node) -> bool:
        """Whether reading ends at a node by what it is of."""
        try:
            if node.op_type in (*_PRODUCTS, "Add"):
                return self._is_linear(node)
            if node.op_type not in _READ_IF_WEIGHTS or node.op_type == "Pad":
                return False
            return not self.is_of_weights(self.input(node, 0))
        except Unreadable:
            return True

    def _decisive(self, node: ir.Node) -> list[ir.Value]:
        """The inputs that decide, by what they are of, whether a node is looked into."""
        given = [v for v in node.inputs[:2] if v is not None]
        if node.op_type in _READ_IF_WEIGHTS:
            given = given[:1]
        elif node.op_type not in _PRODUCTS:
            return []
        computed = [v for v in given if self.probed.constant(v) is None]
        is_one = len(computed) == 1 and self.probed.is_float(computed[0])
        return computed if is_one and node.domain in ("", "ai.onnx") else []

    def leaf(self, value: ir.Value, dims: Dims) -> Product:
        """A value that is not looked into; what it rests on is not varied by itself."""
        return as_product(
            Indicator(value, dims) if self.probed.is_boolean(value) else Leaf(value, dims)
        )

    def _end(self, value: ir.Value, dims: Dims) -> Product:
        if depends_on_inputs(value) and not self.probed.is_boolean(value):
            self.ends[value] = None
        return self.leaf(value, dims)

    def input(self, node: ir.Node, index: int) -> ir.Value:
        """What a node is given; raises Unreadable where that is left out."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            raise Unreadable(f"{node.op_type} has no input {index}")
        return value

    def arguments(
        self, node: ir.Node, dims: Dims, *, through_linear: bool = False
    ) -> tuple[Product, ...]:
        """All that a node is given, each broadcast to ``dims``."""
        given = (v for v in node.inputs if v is not None)
        return tuple(self.broadcast(v, dims, through_linear=through_linear) for v in given)

    def broadcast(self, value: ir.Value, dims: Dims, *, through_linear: bool = False) -> Product:
        """A value whose dims, from the last, are ``dims`` or of size 1."""
        sizes = self.shape(value)
        if len(sizes) > len(dims):
            raise Unreadable(f"{value.name} has more dims than the result that it is broadcast to")
        own = dims[len(dims) - len(sizes) :]
        kept = (() if set(s) == {1} else axes for s, axes in zip(sizes, own, strict=True))
        return self.read(value, tuple(kept), through_linear=through_linear)

    def is_of_weights(self, value: ir.Value) -> bool:
        """Whether a value is exponentials times something, or windows of such."""
        return any(self._weights(value))

    def is_windowed(self, value: ir.Value) -> bool:
        """Whether a value is windows of what ``is_of_weights``."""
        return self._weights(value)[1]

    def _weights(self, value: ir.Value) -> tuple[bool, bool]:
        """Whether it is exponentials times something, and whether it is windows of such."""
        if value not in self._of_weights:
            formula = self.blank_copy().read_separately(value)
            exponentials = any(isinstance(atom, Exp) for atom, _ in formula.factors)
            self._of_weights[value] = exponentials, has_window(formula)
        return self._of_weights[value]

    def read_separately(
        self, value: ir.Value, dims: Dims | None = None, parts: Mapping[Axis, Part] | None = None
    ) -> Product:
        """What a value is, with no effect on what was read so far; 1 where no formula is found.

        Args:
            value: of the graph.
            dims: axes that nothing else has; without them new ones are made.
            parts: those of which only a part is read.
        """
        reader = self.blank_copy()
        reader.parts |= parts or {}
        if self._within is not None and value in self._within:
            reader._within = self._within
        try:
            return reader.read(value, reader.new_dims(value) if dims is None else dims)
        except Unreadable:
            return Product()

    def _is_linear(self, node: ir.Node) -> bool:
        """Whether a node is a product of something with weights, or adds a bias to one.

        The position biases of AFT are a constant matrix too; what they weigh is exponentials.
        """
        if node not in self._linear:
            self._linear[node] = self._multiplies_by_weights(node)
        return self._linear[node]

    def _multiplies_by_weights(self, node: ir.Node) -> bool:
        if node.op_type == "Add":
            given = [v for v in node.inputs if v is not None]
            constants = [v for v in given if self.probed.constant(v) is not None]
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
    given: dict[str, Any] = {name: a.value for name, a in sorted(node.attributes.items())}
    return node.op_type + (str(given) if given else "")


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
"""An operator as a formula, from the reader, the node, and the axes of the dims of its output.

None says that a leaf stands for the node.
"""
