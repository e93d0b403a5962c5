"""What a value of an ONNX graph is, as a formula over the axes it is asked for.

Reads backwards from a value: transposes, reshapes and broadcasts become which axis lies where,
every product of tensors becomes a sum over the axis it contracts, softmax becomes exponentials;
``formulas`` has what each operator is. Where reading ends (inputs, linear layers, norms, anything
else), a leaf stands.
"""

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from aftexport.fuse.algebra import plus
from aftexport.fuse.atoms import Exp, Function, Greatest, Leaf, Product, Truth, number, one
from aftexport.fuse.axes import Axis, Dims, LayoutError, Part, fresh
from aftexport.fuse.formulas import FORMULAS
from aftexport.fuse.measured import Measured, rests_on_inputs
from aftexport.fuse.windows import has_window

ELEMENTWISE = frozenset({
    "Abs", "Ceil", "Celu", "Clip", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mod", "Pow", "Relu", "Round",
    "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh",
    "ThresholdedRelu",
})  # fmt: skip
"""Operators that give numbers of each entry alone, with broadcasting."""
_PRODUCTS = ("MatMul", "Gemm", "Einsum")


class Reader:
    """Reads one value, and what it rests on, as formulas, while all that stays as it is.

    Attributes:
        measured: the graph's values.
        maxima: every maximum that was read; a match has to account for each.
        ends: the tensors at which reading ended.
        parts: axes of dims of which only a part is read.
        shapes: what tensors were reshaped to, with the dims that came of it.
    """

    def __init__(self, measured: Measured) -> None:
        self.measured = measured
        self.maxima: list[Greatest] = []
        self.ends: dict[ir.Value, None] = {}
        self.parts: dict[Axis, Part] = {}
        self.shapes: list[tuple[ir.Value, Dims]] = []
        self._of_weights: dict[ir.Value, tuple[bool, bool]] = {}

    def anew(self) -> "Reader":
        """One that has read nothing yet, but knows which values are of weights."""
        reader = Reader(self.measured)
        reader._of_weights = self._of_weights
        return reader

    def read_output(self, value: ir.Value) -> tuple[Product, Dims]:
        """A value with an axis of its own for every dim; raises LayoutError."""
        dims = self.new_dims(value)
        return self.read(value, dims), dims

    def new_dims(self, value: ir.Value) -> Dims:
        """An axis for every dim of a value."""
        return tuple(fresh(sizes) for sizes in self.shape(value))

    def shape(self, value: ir.Value) -> list[tuple[int, ...]]:
        """The sizes of every dim; raises LayoutError where they were not measured."""
        shapes = self.measured.shapes(value)
        if shapes is None or len({len(shape) for shape in shapes}) != 1:
            raise LayoutError
        return [tuple(sizes) for sizes in zip(*shapes, strict=True)]

    def read(self, value: ir.Value, dims: Dims, *, through_linear: bool = False) -> Product:
        """A value as a formula.

        Args:
            value: of the graph.
            dims: the axes of each of its dims.
            through_linear: do not stop at a linear layer that ``value`` comes from.

        Raises:
            LayoutError: where a reshape does not come apart into axes.
        """
        array = self.measured.constant(value)
        steady = self.measured.number(value)
        if steady is not None:
            return number(steady)
        if array is not None and array.size == 1 and array.dtype.kind in "iub":
            return number(float(array.reshape(())))
        node = value.producer()
        if array is not None:
            return self.leaf(value, dims)
        if node is None or node.domain not in ("", "ai.onnx"):
            return self._end(value, dims)
        if node.op_type in _PRODUCTS and not rests_on_inputs(value):
            # As factors of a position bias, whose sum is over no tokens.
            return self._end(value, dims)
        if node.op_type in (*_PRODUCTS, "Add") and self._is_linear(node):
            if not through_linear:
                return self._end(value, dims)
            if node.op_type == "Add":
                return plus(self.arguments(node, dims, through_linear=True), value, dims)
        formula = FORMULAS.get(node.op_type)
        if formula is not None and value is node.outputs[0]:
            found = formula(self, node, dims)
            return found if found is not None else self._end(value, dims)
        if node.op_type in ELEMENTWISE:
            return one(Function(_named(node), self.arguments(node, dims), value, dims))
        return self._end(value, dims)

    def leaf(self, value: ir.Value, dims: Dims) -> Product:
        """A value that is not looked into; what it rests on is not varied by itself."""
        return one(Truth(value, dims) if self.measured.is_truth(value) else Leaf(value, dims))

    def _end(self, value: ir.Value, dims: Dims) -> Product:
        if rests_on_inputs(value) and not self.measured.is_truth(value):
            self.ends[value] = None
        return self.leaf(value, dims)

    def input(self, node: ir.Node, index: int) -> ir.Value:
        """What a node is given; raises LayoutError where that is left out."""
        value = node.inputs[index]
        if value is None:
            raise LayoutError
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
            formula = self.apart(value)
            exponentials = any(isinstance(atom, Exp) for atom, _ in formula.factors)
            self._of_weights[value] = exponentials, has_window(formula)
        return self._of_weights[value]

    def apart(
        self, value: ir.Value, dims: Dims | None = None, parts: Mapping[Axis, Part] | None = None
    ) -> Product:
        """What a value is, with no effect on what was read so far; 1 where no formula is found.

        Args:
            value: of the graph.
            dims: axes that nothing else has; without them new ones are made.
            parts: those of which only a part is read.
        """
        reader = self.anew()
        reader.parts |= parts or {}
        try:
            return reader.read(value, reader.new_dims(value) if dims is None else dims)
        except (LayoutError, ValueError):
            return Product()

    def _is_linear(self, node: ir.Node) -> bool:
        """Whether a node is a product of something with weights, or adds a bias to one.

        The position biases of AFT are a constant matrix too; what they weigh is exponentials.
        """
        if node.op_type == "Add":
            given = [v for v in node.inputs if v is not None]
            constants = [v for v in given if self.measured.constant(v) is not None]
            if len(constants) != 1 or len(self.shape(constants[0])) != 1:
                return False
            product = self.input(node, 1 if node.inputs[0] is constants[0] else 0).producer()
            return (
                product is not None
                and product.op_type in ("MatMul", "Einsum")
                and self._is_linear(product)
            )
        inputs = [v for v in node.inputs[:2] if v is not None]
        constants = [v for v in inputs if self.measured.constant(v) is not None]
        if len(inputs) != 2 or len(constants) != 1 or len(node.inputs) > 3:
            return False
        return not self.is_of_weights(inputs[1] if constants[0] is inputs[0] else inputs[0])


def _named(node: ir.Node) -> str:
    given: dict[str, Any] = {name: a.value for name, a in sorted(node.attributes.items())}
    return node.op_type + (str(given) if given else "")
