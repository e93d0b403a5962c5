"""The writer, which turns formulas into nodes of a graph in the layout of an operator.

``write_nodes`` adds the nodes of a rewrite: its operands, the operator and the factors outside.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.lowering import nodes as matching
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.recognition.algebra import free
from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.patterns.pattern import Division, Operand, Rewrite, is_held, size_of
from aftexport.recognition.terms import (
    Axis,
    Count,
    Dims,
    Exp,
    Function,
    Indicator,
    Leaf,
    Max,
    Plus,
    Product,
    Unreadable,
    flat,
    flat_dims,
    single_atom,
)


class Writer:
    """New nodes for one rewrite, outside the graph until they are compared.

    The nodes are in an order of execution, and their constants in float64 or int64.
    """

    def __init__(
        self,
        probed: ProbedGraph,
        dtype: np.dtype[np.generic],
        prefix: str,
        # The shapes that the graph computes, with the dims of which they are the sizes.
        shapes: Sequence[tuple[ir.Value, Dims]] = (),
    ) -> None:
        """Begin a rewrite."""
        self._probed = probed
        self._dtype = dtype
        self.prefix = prefix
        self.nodes: list[ir.Node] = []
        self.constants: dict[ir.Value, NDArray[np.generic]] = {}
        self._shapes = shapes
        self._places: dict[Axis, tuple[ir.Value, int]] = {}

    def tensor(self, product: Product, groups: Dims, *, is_spread: bool = False) -> ir.Value:
        """Return a formula as a tensor whose dims are ``groups`` of axes.

        If ``is_spread``, it is repeated along the axes that it lacks.

        Raises:
            Unreadable: if it lacks one of the axes, depends on another, or has no such layout.
        """
        groups = flat_dims(groups)
        order = [axis for axes in groups for axis in axes]
        lacking = set(order) - free(product)
        if (not is_spread and lacking) or free(product) - set(order):
            raise Unreadable("a tensor has other axes than its formula")
        atom = single_atom(product)
        if is_held(atom) and not lacking:
            return self.laid_out(_value(atom), atom.dims, groups)
        apart: Dims = tuple((axis,) for axis in order)
        value = self._spread(self._product(product, order), order, lacking)
        return self.laid_out(value, apart, groups)

    def _spread(self, value: ir.Value, order: Sequence[Axis], lacking: set[Axis]) -> ir.Value:
        """Return a tensor with a dim for each axis in ``order``, repeated along those it lacks."""
        if not lacking:
            return value
        if not all(axis.is_fixed for axis in lacking):
            raise Unreadable("a tensor is repeated along an axis of any size")
        shape = [axis.sizes[0] if axis in lacking else 1 for axis in order]
        return self.node("Expand", value, self.constant(shape))

    def joined(self, parts: Sequence[tuple[Product, Dims]]) -> ir.Value:
        """Return formulas as one tensor ``[B, T, D]``; the channels of all follow in each head.

        Each has dims ``[B, T, H, d]``.
        """
        tensors = [self.tensor(formula, groups) for formula, groups in parts]
        whole = self.node("Concat", *tensors, axis=3)
        return self.node("Reshape", whole, self.constant([0, 0, -1]))

    def constant(self, array: NDArray[np.generic] | Sequence[int]) -> ir.Value:
        """Return a constant, of int64 for integers and of the type of the rewrite otherwise."""
        array = np.asarray(array)
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.float64)
        name = f"{self.prefix}_constant_{len(self.constants)}"
        # Numbers get the type of the graph when they are inserted.
        known = ir.tensor(array, name=name) if array.dtype.kind == "i" else None
        value = ir.val(name, const_value=known)
        self.constants[value] = array
        return value

    def node(self, op_type: str, *inputs: ir.Value, **attributes: int | list[int]) -> ir.Value:
        """Return the output of a new node of a standard operator."""
        node = ir.node(op_type, inputs, attributes)
        self.nodes.append(node)
        node.outputs[0].name = f"{self.prefix}_{op_type.lower()}_{len(self.nodes)}"
        return node.outputs[0]

    def discard(self) -> None:
        """Detach the nodes from the graph: its values would be computed for them otherwise."""
        for node in self.nodes:
            for place in range(len(node.inputs)):
                node.replace_input_with(place, None)

    def laid_out(self, value: ir.Value, dims: Dims, groups: Dims) -> ir.Value:
        """Return a tensor of ``dims`` in the dims ``groups``; axes it lacks have size 1."""
        dims, groups = flat_dims(dims), flat_dims(groups)
        self._note_places(value, dims)
        have = [axis for axes in dims for axis in axes]
        wanted = [axis for axes in groups for axis in axes if axis in have]
        if set(have) - set(wanted):
            raise Unreadable("a tensor has an axis that its layout lacks")
        groups = tuple(tuple(a for a in axes if a in have) for axes in groups)
        if have != wanted:
            # A batch of 1 stays a dim, as a dynamic batch does.
            batch: Dims = ((),) if groups[0] == () else ()
            runs = _runs(have, wanted)
            value = self._reshaped(value, dims, (*batch, *runs))
            order = sorted(range(len(runs)), key=lambda place: wanted.index(runs[place][0]))
            order = [*range(len(batch)), *(len(batch) + place for place in order)]
            apart = (*batch, *runs)
            value = self.node("Transpose", value, perm=order)
            dims = tuple(apart[place] for place in order)
        return self._reshaped(value, dims, groups)

    def _note_places(self, value: ir.Value, dims: Dims) -> None:
        """Note the dims of a tensor of the graph that are one dynamic axis each."""
        if self._probed.has(value):
            for place, axes in enumerate(dims):
                if len(axes) == 1 and not axes[0].is_fixed:
                    self._places.setdefault(axes[0], (value, place))

    def _size(self, axes: Sequence[Axis]) -> ir.Value:
        """Return the size of axes together, ``[1]``; raises Unreadable if no tensor has it."""
        fixed = [axis.sizes[0] for axis in axes if axis.is_fixed]
        size = self.constant([int(np.prod(fixed, dtype=np.int64))])
        for axis in axes:
            if not axis.is_fixed:
                size = self.node("Mul", size, self._size_of(axis))
        return size

    def _size_of(self, axis: Axis) -> ir.Value:
        if axis in self._places:
            value, place = self._places[axis]
            return self.node("Shape", value, start=place, end=place + 1)
        value, place = self._entry(axis)
        start, end, along = (self.constant([n]) for n in (place, place + 1, 0))
        return self.node("Slice", value, start, end, along)

    def _entry(self, axis: Axis) -> tuple[ir.Value, int]:
        """Return a shape computed by the graph that has the size of an axis, and its place."""
        for value, dims in self._shapes:
            runs = self._probed.in_every_run(value) or []
            for place, axes in enumerate(flat_dims(dims)):
                if axes == (axis,) and all(run[place] > 0 for run in runs) and runs:
                    return value, place
        raise Unreadable("no tensor of the graph has the size of an axis")

    def _is_known(self, axes: Sequence[Axis]) -> bool:
        """Return whether the graph has the size of each axis."""
        try:
            return all(axis.is_fixed or axis in self._places or self._entry(axis) for axis in axes)
        except Unreadable:
            return False

    def _reshaped(self, value: ir.Value, dims: Dims, groups: Dims) -> ir.Value:
        if dims == groups:
            return value
        same = {i for i, axes in enumerate(groups) if i < len(dims) and dims[i] == axes}
        moving = [i for i, axes in enumerate(groups) if not all(axis.is_fixed for axis in axes)]
        left = [index for index in moving if index not in same]
        # The runtime infers one size, preferably one that no tensor has.
        unknown = [i for i in left if groups[i] not in dims and not self._is_known(groups[i])]
        shape: list[int | ir.Value] = []
        for index, axes in enumerate(groups):
            if index not in moving:
                shape.append(int(np.prod([axis.sizes[0] for axis in axes], dtype=np.int64)))
            elif index in same:
                shape.append(0)
            elif index == (unknown or left)[0]:
                shape.append(-1)
            elif axes in dims:
                at = dims.index(axes)
                shape.append(self.node("Shape", value, start=at, end=at + 1))
            else:
                shape.append(self._size(axes))
        if not any(isinstance(size, ir.Value) for size in shape):
            return self.node("Reshape", value, self.constant([int(s) for s in shape]))  # type: ignore[arg-type]
        pieces = [s if isinstance(s, ir.Value) else self.constant([s]) for s in shape]
        return self.node("Reshape", value, self.node("Concat", *pieces, axis=0))

    # Below, a tensor has a dim for each axis in ``order``, of size 1 if it lacks the axis.

    def _product(self, product: Product, order: Sequence[Axis]) -> ir.Value:
        apart: Dims = tuple((axis,) for axis in order)
        result: ir.Value | None = None
        below: ir.Value | None = None
        # A size is read from a tensor that is laid out before.
        for atom, power in sorted(product.factors, key=lambda f: isinstance(f[0], Count)):
            if isinstance(atom, Indicator):
                continue
            if is_held(atom):
                value = self.laid_out(_value(atom), atom.dims, apart)
            else:
                value = self._atom(atom, order)
            if abs(power) != 1.0:
                value = self.node("Pow", value, self.constant(np.array(abs(power))))
            if power < 0:
                below = value if below is None else self.node("Mul", below, value)
            else:
                result = value if result is None else self.node("Mul", result, value)
        factor = product.coefficient * np.exp(product.exponent)
        if result is None:
            result = self.constant(np.array(factor))
        elif factor != 1.0:
            result = self.node("Mul", result, self.constant(np.array(factor)))
        result = result if below is None else self.node("Div", result, below)
        return self._where(product, result, 0.0, order)

    def _where(
        self, product: Product, value: ir.Value, otherwise: float, order: Sequence[Axis]
    ) -> ir.Value:
        """Return ``value`` where all conditions among the factors hold, else ``otherwise``."""
        for atom, power in product.factors:
            if not isinstance(atom, Indicator):
                continue
            if power < 0.0:
                raise Unreadable("a condition divides")
            condition = self.laid_out(atom.value, atom.dims, tuple((axis,) for axis in order))
            other = self.constant(np.array(otherwise))
            either = (value, other) if atom.holds else (other, value)
            value = self.node("Where", condition, *either)
        return value

    def _atom(self, atom: object, order: Sequence[Axis]) -> ir.Value:
        match atom:
            case Plus():
                total = self._product(atom.terms[0], order)
                for term in atom.terms[1:]:
                    total = self.node("Add", total, self._product(term, order))
                return total
            case Exp():
                return self.node("Exp", self._product(atom.argument, order))
            case Count():
                return self._count(atom)
            case Max() if is_held(single_atom(atom.body)):
                # The largest of a held tensor, as a norm has it, takes no more memory than in the
                # graph.
                inner = (*order, *flat(atom.axes))
                places = self.constant([*range(len(order), len(inner))])
                return self.node("ReduceMax", self._product(atom.body, inner), places, keepdims=0)
        raise Unreadable(f"there is no node for {type(atom).__name__}")

    def _count(self, count: Count) -> ir.Value:
        """Return the size of an axis as a number."""
        same = (axis for axis in self._places if axis.sizes == count.axis.sizes)
        axis = next(same, count.axis)
        value = self._size_of(axis) if count.value is None else count.value
        to = ir.DataType.from_numpy(self._dtype).value
        return self.node("Reshape", self.node("Cast", value, to=to), self.constant([1]))

    def multiplied(self, value: ir.Value, groups: Dims, by: Product, dims: Dims) -> ir.Value:
        """Return a tensor of ``groups`` times a formula, with the dims ``dims``."""
        order = [axis for axes in flat_dims(dims) for axis in axes]
        apart: Dims = tuple((axis,) for axis in order)
        numbers = Product(
            tuple(f for f in by.factors if not isinstance(f[0], Indicator)),
            by.coefficient,
            by.exponent,
        )
        if not by.factors:
            scaled = self.node("Mul", value, self._product(by, ()))
            return self.laid_out(scaled, groups, dims)
        value = self.laid_out(value, groups, apart)
        if numbers.factors or numbers.coefficient * np.exp(numbers.exponent) != 1.0:
            value = self.node("Mul", value, self._product(numbers, order))
        return self.laid_out(self._where(by, value, 0.0, order), apart, dims)

    def plus_log(
        self, product: Product, factors: Product, groups: Dims, *, is_spread: bool = False
    ) -> ir.Value:
        """Return ``product + log(factors)`` as a tensor of finite numbers."""
        order = [axis for axes in flat_dims(groups) for axis in axes]
        numbers = Product(tuple(f for f in factors.factors if not isinstance(f[0], Indicator)))
        if not numbers.factors:
            total = self._product(product, order)
        else:
            log = self.node("Log", self._product(numbers, order))
            total = self.node("Add", self._product(product, order), log) if product.factors else log
        total = self._where(factors, total, -np.inf, order)
        if is_spread:
            total = self._spread(total, order, set(order) - free(product) - free(factors))
        return self.floored(self.laid_out(total, tuple((a,) for a in order), groups))

    def with_head(
        self, formula: Product, groups: Dims, width: int, channels: Sequence[Product]
    ) -> ir.Value:
        """Return ``[B, T, D + d]``, a formula and an additional head.

        The additional head, of width d, begins with ``channels``; its other channels are 0.
        """
        packed = self.tensor(formula, groups)
        apart: Dims = tuple((axis,) for axes in flat_dims(groups[:2]) for axis in axes)
        order = [axis for (axis,) in apart]
        head = None
        for index, channel in enumerate(channels):
            column = self._product(channel, order if free(channel) else [])
            if free(channel):
                column = self.laid_out(column, apart, (*groups[:2], ()))
            unit = np.zeros((1, 1, width))
            unit[..., index] = 1.0
            term = self.node("Mul", column, self.constant(unit))
            head = term if head is None else self.node("Add", head, term)
        if head is None:
            return self.node("Pad", packed, self.constant([0, 0, 0, 0, 0, width]))
        return self.node("Concat", packed, head, axis=2)

    def without_head(self, value: ir.Value, channels: int) -> ir.Value:
        """Return ``[B, T, D + d]`` without the last head; ``channels`` is D."""
        start, end, axis = (self.constant([n]) for n in (0, channels, 2))
        return self.node("Slice", value, start, end, axis)

    def with_ones(self, value: ir.Value, heads: int, width: int) -> ir.Value:
        """Return ``[B, S, H (e + 1)]``, a tensor ``[B, S, H e]`` with a last 1 in each head."""
        apart = self.node("Reshape", value, self.constant([0, 0, heads, width]))
        pads = self.constant([0, 0, 0, 0, 0, 0, 0, 1])
        padded = self.node("Pad", apart, pads, self.constant(np.array(1.0)))
        return self.node("Reshape", padded, self.constant([0, 0, heads * (width + 1)]))

    def divided(self, value: ir.Value, by: Division, heads: int, width: int) -> ir.Value:
        """Return ``[B, T, H e]``, the channels ``[B, T, H (e + 1)]`` over the last of each head."""
        apart = self.node("Reshape", value, self.constant([0, 0, heads, width + 1]))
        start, last, end, axis = (self.constant([n]) for n in (0, width, width + 1, 3))
        numerator = self.node("Slice", apart, start, last, axis)
        total = self.node("Slice", apart, last, end, axis)
        if by.normalizer == "clamp":
            total = self.node("Max", total, self.constant(np.array(by.eps)))
        elif by.eps:
            total = self.node("Add", total, self.constant(np.array(by.eps)))
        quotient = self.node("Div", numerator, total)
        return self.node("Reshape", quotient, self.constant([0, 0, heads * width]))

    def floored(self, value: ir.Value) -> ir.Value:
        """Return a tensor in which -inf is replaced by the lowest finite logit."""
        lowest = -6e4 if self._dtype == np.float16 else -1e38
        return self.node("Max", value, self.constant(np.array(lowest)))


def _runs(have: Sequence[Axis], wanted: Sequence[Axis]) -> Dims:
    """Return axes in the longest runs whose axes follow one another in both orders."""
    runs: list[list[Axis]] = []
    for axis in have:
        place = wanted.index(axis)
        if runs and place and wanted[place - 1] is runs[-1][-1]:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return tuple(map(tuple, runs))


def _value(atom: Leaf | Function | Plus) -> ir.Value:
    assert atom.value is not None
    return atom.value


def write_nodes(writer: Writer, rewrite: Rewrite, dims: Dims) -> ir.Value:
    """Write a rewrite and return its output; raises Unreadable if the layout cannot be written."""
    written = {id(operand): operand for operand in rewrite.operands}
    values = {name: _operand(writer, rewrite, operand) for name, operand in written.items()}
    inputs = [values[id(operand)] for operand in rewrite.operands]
    heads, width = 1, 1
    if rewrite.division is not None:
        heads = int(rewrite.attributes["num_heads"])
        width = size_of(flat(rewrite.groups[2])) // heads
        kv_heads = int(rewrite.attributes.get("kv_num_heads", heads))
        inputs[2] = writer.with_ones(inputs[2], kv_heads, width)
    lengths = [_lengths(writer, inputs[place]) for place in range(1 + rewrite.has_key_lengths)]
    inputs += lengths
    own = {a.name: a.default for a in ALL_OPERATORS[rewrite.op_type].kernel_attributes}
    node = matching.custom_node(rewrite.op_type, inputs, {**own, **rewrite.attributes})
    writer.nodes.append(node)
    node.outputs[0].name = f"{writer.prefix}_{rewrite.op_type}"
    output = node.outputs[0]
    if rewrite.division is not None:
        output = writer.divided(output, rewrite.division, heads, width)
    if rewrite.extra_head:
        output = writer.without_head(output, size_of(flat(rewrite.groups[2])))
    if rewrite.outside.factors or not np.isclose(rewrite.outside.coefficient, 1.0, rtol=1e-12):
        return writer.multiplied(output, rewrite.groups, rewrite.outside, dims)
    return writer.laid_out(output, rewrite.groups, dims)


def _lengths(writer: Writer, value: ir.Value) -> ir.Value:
    """Return the lengths of documents without padding, from a tensor ``[B, T, D]``."""
    batch = writer.node("Shape", value, start=0, end=1)
    tokens = writer.node("Shape", value, start=1, end=2)
    return writer.node("Expand", tokens, batch)


def _operand(writer: Writer, rewrite: Rewrite, operand: Operand | NDArray[np.float64]) -> ir.Value:
    if not isinstance(operand, Operand):
        return writer.constant(operand)
    if operand.weights.factors:
        return writer.plus_log(
            operand.formula, operand.weights, operand.groups, is_spread=operand.is_spread
        )
    if operand.joined:
        return writer.joined([(operand.formula, operand.groups), *operand.joined])
    if rewrite.extra_head:
        channels, heads = size_of(flat(operand.groups[2])), int(rewrite.attributes["num_heads"]) - 1
        return writer.with_head(operand.formula, operand.groups, channels // heads, operand.beside)
    value = writer.tensor(operand.formula, operand.groups, is_spread=operand.is_spread)
    return writer.floored(value) if operand.floored else value
