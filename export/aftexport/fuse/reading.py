"""What a value of an ONNX graph is, as a formula over the axes it is asked for.

Reads backwards from a value: transposes, reshapes and broadcasts become which axis lies where,
every product of tensors becomes a sum over the axis it contracts, softmax becomes exponentials.
Where reading ends (inputs, linear layers, norms, convolutions, anything else), a leaf stands.
"""

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from aftexport.fuse import algebra
from aftexport.fuse.algebra import Function, Greatest, Leaf, Product, number, one, plus, times
from aftexport.fuse.axes import Axis, Dims, LayoutError, fresh, regroup
from aftexport.fuse.measured import Measured

ELEMENTWISE = frozenset({
    "Abs", "And", "Ceil", "Celu", "Clip", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu",
    "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "Max", "Min", "Mish", "Mod", "Not", "Or", "Pow", "Relu", "Round",
    "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh",
    "ThresholdedRelu", "Where", "Xor",
})  # fmt: skip
"""Operators that work on each entry alone, with broadcasting."""


class Reader:
    """Reads one value, and what it rests on, as formulas.

    Attributes:
        maxima: every maximum that was read; a match has to account for each.
        ends: the tensors at which reading ended.
    """

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self.maxima: list[Greatest] = []
        self.ends: dict[ir.Value, None] = {}

    def read_output(self, value: ir.Value) -> tuple[Product, Dims]:
        """A value with an axis of its own for every dim; raises LayoutError."""
        dims = self.new_dims(value)
        return self.read(value, dims), dims

    def new_dims(self, value: ir.Value) -> Dims:
        """An axis for every dim of a value."""
        return tuple(fresh(sizes) for sizes in self.shape(value))

    def shape(self, value: ir.Value) -> list[tuple[int, ...]]:
        """The sizes of every dim; raises LayoutError where they were not measured."""
        shapes = self._measured.shapes(value)
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
        array = self._measured.constant(value)
        if array is None and not rests_on_inputs(value):
            array = self._measured.steady_scalar(value)
            if array is not None:
                return number(float(array.reshape(())))
        if array is not None and array.size == 1 and array.dtype.kind in "fiub":
            return number(float(array.reshape(())))
        node = value.producer()
        if array is not None:
            return one(Leaf(value, dims))
        if node is None or node.domain not in ("", "ai.onnx"):
            return self._end(value, dims)
        method: Callable[..., Product] | None = getattr(self, f"_read_{node.op_type.lower()}", None)
        if node.op_type in ("MatMul", "Gemm", "Einsum", "Add") and self._is_linear(node):
            if not through_linear:
                return self._end(value, dims)
            if node.op_type == "Add":
                return plus(self._arguments(node, dims, through_linear=True), value, dims)
        if method is not None and value is node.outputs[0]:
            found = method(node, dims)
            return found if found is not None else self._end(value, dims)
        if node.op_type in ELEMENTWISE:
            return one(Function(_named(node), self._arguments(node, dims), value, dims))
        return self._end(value, dims)

    def _end(self, value: ir.Value, dims: Dims) -> Product:
        if rests_on_inputs(value):
            self.ends[value] = None
        return one(Leaf(value, dims))

    # Elementwise

    def _arguments(
        self, node: ir.Node, dims: Dims, *, through_linear: bool = False
    ) -> tuple[Product, ...]:
        given = (v for v in node.inputs if v is not None)
        return tuple(self._broadcast(v, dims, through_linear=through_linear) for v in given)

    def _broadcast(self, value: ir.Value, dims: Dims, *, through_linear: bool = False) -> Product:
        sizes = self.shape(value)
        own = dims[len(dims) - len(sizes) :]
        kept = (() if set(s) == {1} else axes for s, axes in zip(sizes, own, strict=True))
        return self.read(value, tuple(kept), through_linear=through_linear)

    def _read_identity(self, node: ir.Node, dims: Dims) -> Product:
        return self.read(_input(node, 0), dims)

    _read_dropout = _read_identity

    def _read_cast(self, node: ir.Node, dims: Dims) -> Product | None:
        if not all(self._measured.is_float(v) for v in (_input(node, 0), node.outputs[0])):
            # A mask: what it rests on are no numbers to be varied.
            return one(Leaf(node.outputs[0], dims))
        return self.read(_input(node, 0), dims)

    def _read_mul(self, node: ir.Node, dims: Dims) -> Product:
        return times(*self._arguments(node, dims))

    def _read_div(self, node: ir.Node, dims: Dims) -> Product | None:
        numerator, denominator = self._arguments(node, dims)
        return times(numerator, algebra.power(denominator, -1.0))

    def _read_reciprocal(self, node: ir.Node, dims: Dims) -> Product:
        return algebra.power(self._arguments(node, dims)[0], -1.0)

    def _read_sqrt(self, node: ir.Node, dims: Dims) -> Product:
        (argument,) = self._arguments(node, dims)
        if argument.factors:
            return one(Function("Sqrt", (argument,), node.outputs[0], dims))
        return algebra.power(argument, 0.5)

    def _read_pow(self, node: ir.Node, dims: Dims) -> Product:
        base, exponent = self._arguments(node, dims)
        if exponent.factors or exponent.coefficient not in (-2.0, -1.0, 1.0, 2.0):
            return one(Function("Pow", (base, exponent), node.outputs[0], dims))
        return algebra.power(base, exponent.coefficient)

    def _read_neg(self, node: ir.Node, dims: Dims) -> Product:
        return algebra.scaled(self._arguments(node, dims)[0], -1.0)

    def _read_add(self, node: ir.Node, dims: Dims) -> Product:
        return plus(self._arguments(node, dims), node.outputs[0], dims)

    _read_sum = _read_add

    def _read_sub(self, node: ir.Node, dims: Dims) -> Product:
        first, second = self._arguments(node, dims)
        return plus((first, algebra.scaled(second, -1.0)), node.outputs[0], dims)

    def _read_exp(self, node: ir.Node, dims: Dims) -> Product:
        return algebra.exponential(self._arguments(node, dims)[0])

    # Layout

    def _read_transpose(self, node: ir.Node, dims: Dims) -> Product:
        order = node.attributes.get_ints("perm", list(reversed(range(len(dims)))))
        return self.read(_input(node, 0), tuple(dims[order.index(i)] for i in range(len(dims))))

    def _read_reshape(self, node: ir.Node, dims: Dims) -> Product:
        source = _input(node, 0)
        return self.read(source, regroup([a for axes in dims for a in axes], self.shape(source)))

    _read_flatten = _read_squeeze = _read_unsqueeze = _read_reshape

    def _read_expand(self, node: ir.Node, dims: Dims) -> Product:
        return self._broadcast(_input(node, 0), dims)

    def _read_tile(self, node: ir.Node, dims: Dims) -> Product | None:
        source = _input(node, 0)
        pairs = zip(self.shape(source), self.shape(node.outputs[0]), strict=True)
        if any(old != new and set(old) != {1} for old, new in pairs):
            return None
        return self._broadcast(source, dims)

    # Sums, maxima, softmax

    def _reduced(self, node: ir.Node, dims: Dims) -> tuple[ir.Value, Dims, list[Axis]]:
        """What a reduction reads, its dims, and the axes it reduces."""
        source = _input(node, 0)
        sizes = self.shape(source)
        axes = self._axes(node, len(sizes))
        kept = node.attributes.get_int("keepdims", 1)
        rest = list(dims)
        inner: list[tuple[Axis, ...]] = []
        for dim, own in enumerate(sizes):
            if dim in axes:
                inner.append(fresh(own))
                if kept:
                    rest.pop(0)
            else:
                inner.append(rest.pop(0))
        return source, tuple(inner), [a for dim in axes for a in inner[dim]]

    def _axes(self, node: ir.Node, rank: int) -> list[int]:
        given: Sequence[int] | None = None
        if "axes" in node.attributes:
            given = node.attributes.get_ints("axes")
        elif len(node.inputs) > 1 and node.inputs[1] is not None:
            array = self._measured.constant(node.inputs[1])
            if array is None:
                raise LayoutError
            given = [int(a) for a in array.reshape(-1)]
        if not given:
            return list(range(rank))
        return sorted(a % rank for a in given)

    def _read_reducesum(self, node: ir.Node, dims: Dims) -> Product:
        source, inner, axes = self._reduced(node, dims)
        return algebra.over(axes, self.read(source, inner))

    def _read_reducemean(self, node: ir.Node, dims: Dims) -> Product:
        source, inner, axes = self._reduced(node, dims)
        count = algebra.over(axes, algebra.ONE)
        return times(algebra.over(axes, self.read(source, inner)), algebra.power(count, -1.0))

    def _read_reducemax(self, node: ir.Node, dims: Dims) -> Product:
        source, inner, axes = self._reduced(node, dims)
        found = algebra.greatest(axes, self.read(source, inner))
        self.maxima += [a for a, _ in found.factors if isinstance(a, Greatest)]
        return found

    def _read_reducelogsumexp(self, node: ir.Node, dims: Dims) -> Product:
        source, inner, axes = self._reduced(node, dims)
        total = algebra.over(axes, algebra.exponential(self.read(source, inner)))
        return one(Function("Log", (total,), node.outputs[0], dims))

    def _softmax_parts(self, node: ir.Node, dims: Dims) -> tuple[Product, Product]:
        source = _input(node, 0)
        axis = node.attributes.get_int("axis", -1) % len(dims)
        summed = fresh(self.shape(source)[axis])
        inner = (*dims[:axis], summed, *dims[axis + 1 :])
        total = algebra.over(summed, algebra.exponential(self.read(source, inner)))
        return self.read(source, dims), total

    def _read_softmax(self, node: ir.Node, dims: Dims) -> Product:
        logits, total = self._softmax_parts(node, dims)
        return times(algebra.exponential(logits), algebra.power(total, -1.0))

    def _read_logsoftmax(self, node: ir.Node, dims: Dims) -> Product:
        logits, total = self._softmax_parts(node, dims)
        log = one(Function("Log", (total,), node.outputs[0], dims))
        return plus((logits, algebra.scaled(log, -1.0)), node.outputs[0], dims)

    def _read_cumsum(self, node: ir.Node, dims: Dims) -> Product | None:
        attributes = node.attributes
        if attributes.get_int("exclusive", 0) or attributes.get_int("reverse", 0):
            return None
        along = self._measured.constant(_input(node, 1))
        if along is None:
            return None
        axis = int(along.reshape(())) % len(dims)
        summed = fresh(self.shape(_input(node, 0))[axis])
        if not summed:
            return self.read(_input(node, 0), dims)
        if len(dims[axis]) != 1:
            return None
        inner = (*dims[:axis], summed, *dims[axis + 1 :])
        reach = one(algebra.UpTo(dims[axis][0], summed[0]))
        return algebra.over(summed, times(reach, self.read(_input(node, 0), inner)))

    # Products of tensors

    def _read_matmul(self, node: ir.Node, dims: Dims) -> Product | None:
        first, second = _input(node, 0), _input(node, 1)
        ranks = len(self.shape(first)), len(self.shape(second))
        if min(ranks) < 2:
            return None
        summed = fresh(self.shape(first)[-1])
        batch, row, column = dims[:-2], dims[-2], dims[-1]
        return algebra.over(
            summed,
            times(
                self._broadcast(first, (*batch, row, summed)),
                self._broadcast(second, (*batch, summed, column)),
            ),
        )

    def _read_gemm(self, node: ir.Node, dims: Dims) -> Product:
        first, second = _input(node, 0), _input(node, 1)
        summed = fresh(self.shape(first)[0 if node.attributes.get_int("transA", 0) else 1])
        rows: Dims = (dims[0], summed)
        columns: Dims = (summed, dims[1])
        if node.attributes.get_int("transA", 0):
            rows = (summed, dims[0])
        if node.attributes.get_int("transB", 0):
            columns = (dims[1], summed)
        product = algebra.over(
            summed, times(self._broadcast(first, rows), self._broadcast(second, columns))
        )
        product = algebra.scaled(product, node.attributes.get_float("alpha", 1.0))
        if len(node.inputs) < 3 or node.inputs[2] is None:
            return product
        bias = self._broadcast(node.inputs[2], dims)
        bias = algebra.scaled(bias, node.attributes.get_float("beta", 1.0))
        return plus((product, bias), node.outputs[0], dims)

    def _read_einsum(self, node: ir.Node, dims: Dims) -> Product | None:
        left, arrow, right = node.attributes.get_string("equation").replace(" ", "").partition("->")
        terms = left.split(",")
        if not arrow or "." in left or any(len(set(t)) != len(t) for t in (*terms, right)):
            return None
        axes = dict(zip(right, dims, strict=True))
        summed: list[Axis] = []
        for term, value in zip(terms, node.inputs, strict=True):
            for letter, sizes in zip(term, self.shape(value), strict=True):  # type: ignore[arg-type]
                if letter not in axes:
                    axes[letter] = fresh(sizes)
                    summed += axes[letter]
        factors = [
            self._broadcast(value, tuple(axes[letter] for letter in term))  # type: ignore[arg-type]
            for term, value in zip(terms, node.inputs, strict=True)
        ]
        return algebra.over(summed, times(*factors))

    def _is_linear(self, node: ir.Node) -> bool:
        """Whether a node is a product of something with weights, or adds a bias to one.

        The position biases of AFT are a constant matrix too; what they weigh is exponentials.
        """
        if node.op_type == "Add":
            given = [v for v in node.inputs if v is not None]
            constants = [v for v in given if self._measured.constant(v) is not None]
            if len(constants) != 1 or len(self.shape(constants[0])) != 1:
                return False
            product = _other(node, constants[0]).producer()
            return (
                product is not None
                and product.op_type in ("MatMul", "Einsum")
                and self._is_linear(product)
            )
        inputs = [v for v in node.inputs[:2] if v is not None]
        constants = [v for v in inputs if self._measured.constant(v) is not None]
        if len(inputs) != 2 or len(constants) != 1 or len(node.inputs) > 3:
            return False
        weighed = inputs[1] if constants[0] is inputs[0] else inputs[0]
        return not self._has_exponential(weighed)

    def _has_exponential(self, value: ir.Value) -> bool:
        try:
            formula, _ = Reader(self._measured).read_output(value)
        except (LayoutError, ValueError):
            return False
        return any(isinstance(a, algebra.Exp) and p > 0 for a, p in formula.factors)


def rests_on_inputs(value: ir.Value) -> bool:
    """Whether a value depends on what the graph is given, and not only on the shape of it."""
    seen: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if node is None and value.const_value is None:
            return True
        if node is None or value in seen or node.op_type in ("Shape", "Size"):
            continue
        seen.add(value)
        waiting += [v for v in node.inputs if v is not None]
    return False


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise LayoutError
    return value


def _other(node: ir.Node, value: ir.Value) -> ir.Value:
    return _input(node, 1 if node.inputs[0] is value else 0)


def _named(node: ir.Node) -> str:
    given: dict[str, Any] = {name: a.value for name, a in sorted(node.attributes.items())}
    return node.op_type + (str(given) if given else "")
