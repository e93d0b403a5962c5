"""Recognition of the layers around the attention: linear layers, norms and hidden layers.

The match is by structure, axes and constants, never by name.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import onnx_ir as ir

from aftexport.lowering import nodes as match

_RANK = 3
"""The axes of a layer's input ``[B, T, D]``."""


@dataclass(frozen=True)
class Linear:
    """``MatMul(x, weight)`` or ``Add(MatMul(x, weight), bias)`` with constants."""

    product: ir.Node
    addition: ir.Node | None
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None

    @property
    def nodes(self) -> list[ir.Node]:
        """The nodes in the order of the graph."""
        return [self.product] if self.addition is None else [self.product, self.addition]

    @property
    def output(self) -> ir.Value:
        """The layer's result."""
        return self.nodes[-1].outputs[0]

    @property
    def columns(self) -> int:
        """The channels of the result."""
        return int(match.constant(self.weight).shape[1])


def linear(product: ir.Node) -> Linear | None:
    """Return the linear layer whose first node is ``product``."""
    if product.op_type != "MatMul" or product.domain != "":
        return None
    x, weight = product.inputs
    if x is None or weight is None or not _is_sequence(x) or match.rank(weight) != 2:
        return None
    addition = match.only_user(product.outputs[0], "Add")
    bias = match.other_input(addition, product.outputs[0]) if addition is not None else None
    if bias is not None and _is_vector(bias, match.constant(weight).shape[1]):
        return Linear(product, addition, x, weight, bias)
    return Linear(product, None, x, weight, None)


def linear_ending_in(value: ir.Value | None) -> Linear | None:
    """Return the linear layer that computes ``value``."""
    node = value.producer() if value is not None else None
    if node is None:
        return None
    inner = [one.producer() for one in node.inputs if one is not None]
    for product in (node, *(inner if node.op_type == "Add" else ())):
        found = linear(product) if product is not None else None
        if found is not None and found.output is value:
            return found
    return None


def only_linear(value: ir.Value) -> Linear | None:
    """Return the linear layer that is the only reader of ``value``."""
    product = match.only_user(value, "MatMul")
    return linear(product) if product is not None else None


@dataclass(frozen=True)
class Norm:
    """A norm over the channels of ``[B, T, D]``."""

    kind: str  # layer or rms
    nodes: tuple[ir.Node, ...]  # in the order of the graph
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    epsilon: float

    @property
    def output(self) -> ir.Value:
        """The normalized value."""
        return self.nodes[-1].outputs[0]

    @property
    def inputs(self) -> list[ir.Value | None]:
        """The first inputs of an operator with this norm."""
        return [self.x, self.weight, self.bias]

    @property
    def attributes(self) -> dict[str, float | str]:
        """The attributes of an operator with this norm."""
        return {"norm": self.kind, "epsilon": self.epsilon}


_NORMS = {"LayerNormalization": "layer", "RMSNormalization": "rms"}


def norm_ending_in(value: ir.Value | None) -> Norm | None:
    """Return the norm that computes ``value``."""
    node = value.producer() if value is not None else None
    return norm_ending_at(node) if node is not None else None


def norm_ending_at(node: ir.Node) -> Norm | None:
    """Return the norm whose last node is ``node``."""
    if node.op_type == "Mul" and node.domain == "":
        return _written_out_rms_norm(node)
    if node.op_type not in _NORMS or node.domain != "":
        return None
    x, weight, *biases = node.inputs
    bias = biases[0] if biases else None
    is_over_channels = node.attributes.get_int("axis", -1) in (-1, _RANK - 1)
    if x is None or weight is None or not is_over_channels or not _is_sequence(x):
        return None
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    return Norm(_NORMS[node.op_type], (node,), x, weight, bias, epsilon)


def _written_out_rms_norm(scaling: ir.Node) -> Norm | None:
    """Return the norm of ``weight * x / sqrt(mean(x ** 2) + epsilon)``, perhaps between casts."""
    weight = next((v for v in scaling.inputs if v is not None and match.rank(v) == 1), None)
    unit = match.other_input(scaling, weight) if weight is not None else None
    narrowing = _producer(unit, "Cast")
    division = _producer(narrowing.inputs[0] if narrowing else unit, "Mul", "Div")
    if weight is None or division is None:
        return None
    for wide in division.inputs[: 2 if division.op_type == "Mul" else 1]:
        divisor = match.other_input(division, wide) if wide is not None else None
        root = _root_mean_square(divisor, wide, is_inverse=division.op_type == "Mul")
        if root is None or wide is None:
            continue
        epsilon, inner = root
        widening = _producer(wide, "Cast")
        x = widening.inputs[0] if widening else wide
        casts = [[one] if one else [] for one in (widening, narrowing)]
        nodes = (*casts[0], *inner, division, *casts[1], scaling)
        if x is not None and _fits(weight, x) and match.are_closed(nodes):
            return Norm("rms", nodes, x, weight, None, epsilon)
    return None


def _root_mean_square(
    divisor: ir.Value | None, wide: ir.Value | None, *, is_inverse: bool
) -> tuple[float, list[ir.Node]] | None:
    """Return epsilon and the nodes of ``sqrt(mean(wide ** 2) + epsilon)``, or of its inverse."""
    inverse = _producer(divisor, "Reciprocal") if is_inverse else None
    if is_inverse and inverse is None:
        return None
    root = _producer(inverse.inputs[0] if inverse else divisor, "Sqrt")
    shifted = _producer(root.inputs[0], "Add") if root else None
    for value in shifted.inputs if shifted else ():
        mean = _producer(value, "ReduceMean")
        squares = _producer(mean.inputs[0], "Pow", "Mul") if mean else None
        if value is None or root is None or shifted is None or mean is None or squares is None:
            continue
        epsilon = _scalar(match.other_input(shifted, value))
        factor = squares.inputs[1]
        is_square = factor is wide if squares.op_type == "Mul" else _scalar(factor) == 2
        if epsilon is not None and is_square and squares.inputs[0] is wide and _keeps_rows(mean):
            return epsilon, [squares, mean, shifted, root, *([inverse] if inverse else [])]
    return None


def _keeps_rows(mean: ir.Node) -> bool:
    """Return whether a mean is over the last axis, which stays."""
    axes = _integers(mean.inputs[1]) if len(mean.inputs) > 1 else None
    return axes in ([-1], [_RANK - 1]) and mean.attributes.get_int("keepdims", 1) == 1


@dataclass(frozen=True)
class Hidden:
    """``activation(inner)``, or gated ``activation(inner) * up``."""

    activation: str
    inner: Linear
    up: Linear | None
    rest: tuple[ir.Node, ...]  # the nodes behind the linear layers

    @property
    def nodes(self) -> list[ir.Node]:
        """The nodes in the order of the graph, the last one computing the result."""
        return [*self.inner.nodes, *(self.up.nodes if self.up else ()), *self.rest]


def hidden_ending_in(value: ir.Value | None) -> Hidden | None:
    """Return the hidden layer of a feed-forward network that computes ``value``."""
    activated = _activation(value)
    if activated is not None:
        inner = linear_ending_in(activated.x)
        return Hidden(activated.name, inner, None, activated.nodes) if inner else None
    gating = _producer(value, "Mul")
    for one in gating.inputs if gating else ():
        activated = _activation(one)
        inner = linear_ending_in(activated.x) if activated else None
        up = linear_ending_in(match.other_input(gating, one)) if gating and one else None
        if gating and activated and inner and up and inner.x is up.x:
            return Hidden(activated.name, inner, up, (*activated.nodes, gating))
    return None


@dataclass(frozen=True)
class _Activation:
    name: str
    x: ir.Value | None
    nodes: tuple[ir.Node, ...]


def _activation(value: ir.Value | None) -> _Activation | None:
    node = _producer(value, "Gelu", "Relu", "Mul")
    if node is None:
        return None
    if node.op_type == "Relu":
        return _Activation("relu", node.inputs[0], (node,))
    if node.op_type == "Gelu":
        is_tanh = node.attributes.get_string("approximate", "none") == "tanh"
        return _Activation("gelu_tanh" if is_tanh else "gelu", node.inputs[0], (node,))
    for factor in node.inputs:
        sigmoid = _producer(factor, "Sigmoid")
        if sigmoid and factor and match.other_input(node, factor) is sigmoid.inputs[0]:
            return _Activation("silu", sigmoid.inputs[0], (sigmoid, node))
    return None


@dataclass(frozen=True)
class Columns:
    """Columns ``[begin, end)`` of a linear layer, which a node cuts off as ``value``."""

    value: ir.Value
    begin: int
    end: int


def parts_of(layer: Linear) -> tuple[list[Columns], list[ir.Node]]:
    """Return the disjoint columns of a layer that Split or Slice nodes read, and these nodes."""
    users = list(dict.fromkeys(user for user, _ in layer.output.uses()))
    parts = []
    for user in users:
        found = _columns(user, layer)
        if found is None or layer.output.is_graph_output():
            return [], []
        parts += found
    ends = sorted((part.begin, part.end) for part in parts)
    is_disjoint = all(a[1] <= b[0] for a, b in pairwise(ends))
    return (parts, users) if len(parts) > 1 and is_disjoint else ([], [])


def _columns(user: ir.Node, layer: Linear) -> list[Columns] | None:
    if user.op_type == "Slice":
        return _slice_columns(user, layer)
    if user.op_type != "Split" or user.attributes.get_int("axis", 0) not in (-1, _RANK - 1):
        return None
    count = len(user.outputs)
    sizes: list[int] | None = [-(-layer.columns // count)] * count
    if len(user.inputs) > 1 and user.inputs[1] is not None:
        sizes = _integers(user.inputs[1])
    if sizes is None:
        return None
    ends = [min(end, layer.columns) for end in accumulate(sizes, initial=0)]
    return [
        Columns(value, begin, end)
        for value, (begin, end) in zip(user.outputs, pairwise(ends), strict=False)
    ]


def _slice_columns(user: ir.Node, layer: Linear) -> list[Columns] | None:
    numbers: list[list[int] | None] = [_integers(value) for value in user.inputs[1:]]
    numbers += [[1] for _ in range(4 - len(numbers))]
    begins, ends, axes, steps = numbers
    if not begins or not ends or axes not in ([-1], [_RANK - 1]) or steps != [1]:
        return None
    begin, end, _ = slice(begins[0], ends[0]).indices(layer.columns)
    return [Columns(user.outputs[0], begin, end)] if begin < end else None


def _producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the standard node that computes a value if it has one of the types."""
    node = value.producer() if value is not None else None
    is_one = node is not None and node.domain == "" and node.op_type in op_types
    return node if is_one else None


def _is_sequence(x: ir.Value) -> bool:
    return x.const_value is None and x.shape is not None and len(x.shape) == _RANK


def _is_vector(value: ir.Value, size: int) -> bool:
    return value.const_value is not None and tuple(value.const_value.shape) == (size,)


def _integers(value: ir.Value | None) -> list[int] | None:
    """Return the numbers of a constant vector; None for another value."""
    if value is None or value.const_value is None:
        return None
    return [int(number) for number in match.constant(value).ravel()]


def _scalar(value: ir.Value | None) -> float | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return float(match.constant(value).item())


def _fits(weight: ir.Value, x: ir.Value) -> bool:
    """Return whether a weight of a norm has the type and the channels of ``x``."""
    is_wide = _is_sequence(x) and x.shape is not None and x.shape[-1] == match.constant(weight).size
    return is_wide and (x.dtype is None or x.dtype == weight.dtype)
