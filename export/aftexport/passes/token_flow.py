"""The kind of every value in a graph, for documents in chunks.

A graph can be computed in chunks if each of its nodes acts on every token separately, is one of our
attentions, or reduces the tokens by an associative operation. A chunk has no padding, so its own
length can replace the document's only in masks of padding.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.bundle.manifest import Pooling
from aftexport.contract import FEATURES, IDS, LENGTHS
from aftexport.operators.domain import DOMAIN

Array = NDArray[np.generic]


class NotChunkable(Exception):  # noqa: N818 (an outcome, not an error)
    """The reason why a model's documents cannot be computed in chunks, as its message."""


class Kind(Enum):
    """The dependence of a value on the document."""

    CONSTANT = auto()
    FILL = auto()
    """Constants equal for every token, in a shape that depends on the document's length."""
    LENGTH = auto()
    """The number of the document's tokens."""
    DOCUMENT = auto()
    """Other values computed from the number of tokens or of documents."""
    POSITIONS = auto()
    """The position of every token, from 0."""
    MASK = auto()
    """A mask of the document's own positions, without padding, ``[B, T, ...]``."""
    TOKENS = auto()
    """``[B, T]`` or ``[B, T, C]``, computed from each token separately, or by an attention."""
    POOLED = auto()
    """``[B, ...]``, computed from the whole document."""


_ELEMENTWISE = frozenset((
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Cos", "Div", "Elu", "Equal",
    "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish",
    "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mul", "Neg",
    "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign",
    "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tanh", "Where",
))  # fmt: skip
_LAYOUTS = frozenset(("Cast", "Expand", "Identity", "Squeeze", "Unsqueeze"))
_LAST_AXIS = frozenset(("LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax"))
_SIZES = frozenset((Kind.CONSTANT, Kind.FILL, Kind.LENGTH, Kind.DOCUMENT))


def classify(model: onnx.ModelProto) -> dict[str, Kind]:
    """Return the kind of every value of a graph.

    Raises:
        NotChunkable: if a node needs the whole document; the message names the node.
    """
    constants = constants_of(model.graph)
    kinds = dict.fromkeys(constants, Kind.CONSTANT)
    kinds.update({"": Kind.CONSTANT, IDS: Kind.TOKENS, FEATURES: Kind.TOKENS, LENGTHS: Kind.LENGTH})
    for node in model.graph.node:
        if any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute):
            raise NotChunkable(f"{node.op_type} ({node.output[0]}) branches or loops")
        kind = _kind(_Step(node, kinds, constants))
        kinds.update(dict.fromkeys(node.output, kind))
    for output in model.graph.output:
        if kinds[output.name] is not Kind.POOLED:
            raise NotChunkable(f"{output.name} is not pooled from the tokens")
    return kinds


def constants_of(graph: onnx.GraphProto) -> Mapping[str, Array]:
    """Return initializers and the outputs of Constant nodes by name."""
    return _Constants(graph)


class _Constants(Mapping[str, Array]):
    """A mapping that converts constants on access: all arrays at once would double the memory."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._values: dict[str, Any] = {i.name: i for i in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                value = onnx.helper.get_attribute_value(node.attribute[0])
                self._values[node.output[0]] = value

    def __getitem__(self, name: str) -> Array:
        value = self._values[name]
        if isinstance(value, onnx.TensorProto):
            return onnx.numpy_helper.to_array(value)
        return np.asarray(value)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def pooling(node: onnx.NodeProto, constants: Mapping[str, Array]) -> Pooling | None:
    """Return a node's pooling over the tokens, ``sum``, ``max`` or ``first``; None for none."""
    if node.op_type == "Gather":
        index = constants.get(node.input[1])
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        return "first" if axis == 1 and index is not None and index.tolist() in (0, [0]) else None
    if is_sum_over_tokens(node, constants):
        return "sum"
    return "max" if node.op_type == "ReduceMax" and _reduces_tokens(node, constants) else None


def is_sum_over_tokens(node: onnx.NodeProto, constants: Mapping[str, Array]) -> bool:
    """Return whether a node is a ReduceSum over axis 1 only."""
    return node.op_type == "ReduceSum" and _reduces_tokens(node, constants)


def is_reduction_over_tokens(node: onnx.NodeProto, constants: Mapping[str, Array]) -> bool:
    """Return whether a node is a ReduceSum or ReduceMean over axis 1 only."""
    return node.op_type in ("ReduceSum", "ReduceMean") and _reduces_tokens(node, constants)


def _reduces_tokens(node: onnx.NodeProto, constants: Mapping[str, Array]) -> bool:
    axes = constants.get(node.input[1]) if len(node.input) > 1 else None
    return axes is not None and axes.tolist() == [1]


@dataclass(frozen=True)
class _Step:
    """A node of a graph, with the kinds of all values before it."""

    node: onnx.NodeProto
    kinds: Mapping[str, Kind]
    constants: Mapping[str, Array]

    @property
    def operands(self) -> set[Kind]:
        """The kinds of the inputs."""
        return {self.kinds[name] for name in self.node.input}


def _kind(step: _Step) -> Kind:
    """Return the kind of a node's outputs, by the first rule that applies."""
    kinds = (rule(step) for rule in _RULES)
    kind = next((kind for kind in kinds if kind is not None), None)
    if kind is None:
        raise _refused(step.node, "is not known to act on each token alone")
    return kind


def _attention(step: _Step) -> Kind | None:
    node, kinds = step.node, step.kinds
    if node.domain != DOMAIN:
        return None
    operands = {kinds[name] for name in node.input[:3]}
    if not operands <= {Kind.TOKENS, Kind.MASK, Kind.FILL}:
        raise _refused(node, "attends to values that are not computed token by token")
    if kinds[node.input[-1]] is not Kind.LENGTH:
        raise _refused(node, "attends to other tokens than the document has")
    return Kind.TOKENS


def _constant(step: _Step) -> Kind | None:
    return Kind.CONSTANT if step.operands <= {Kind.CONSTANT} else None


def _shape(step: _Step) -> Kind | None:
    if step.node.op_type != "Shape":
        return None
    axes = {a.name: a.i for a in step.node.attribute}
    is_tokens = step.operands == {Kind.TOKENS} and axes == {"start": 1, "end": 2}
    return Kind.LENGTH if is_tokens else Kind.DOCUMENT


def _positions(step: _Step) -> Kind | None:
    node = step.node
    if Kind.POSITIONS not in step.operands:
        return None
    if node.op_type in ("Cast", "Unsqueeze"):
        return Kind.POSITIONS
    pair = [step.kinds[name] for name in node.input]
    if node.op_type in ("Greater", "LessOrEqual"):
        pair.reverse()
    elif node.op_type not in ("Less", "GreaterOrEqual"):
        pair.clear()
    # Only this comparison has the same result for all tokens of the document.
    if pair != [Kind.POSITIONS, Kind.LENGTH]:
        raise _refused(node, "uses the positions of tokens")
    return Kind.MASK


def _size(step: _Step) -> Kind | None:
    node, kinds, constants = step.node, step.kinds, step.constants
    if not step.operands <= _SIZES:
        return None
    first, *rest = node.input
    match node.op_type:
        case "Range":
            limit, increment = rest
            counts = constants.get(first) == 0 and constants.get(increment) == 1
            return Kind.POSITIONS if counts and kinds[limit] is Kind.LENGTH else Kind.DOCUMENT
        case "Clip":
            # A document has at least one token.
            low = all(n in constants and constants[n].item() <= 1 for n in rest[:1] if n)
            high = all(kinds[n] is Kind.LENGTH for n in rest[1:] if n)
            return kinds[first] if kinds[first] is Kind.LENGTH and low and high else Kind.DOCUMENT
        case "ConstantOfShape":
            return Kind.FILL
        case "Expand" if first in constants and _has_no_tokens(constants[first].shape):
            return Kind.FILL
        case "Reshape" if kinds[first] is Kind.LENGTH:
            return Kind.LENGTH
        case layout if layout in _LAYOUTS and kinds[first] in (Kind.LENGTH, Kind.FILL):
            return kinds[first]
        case _:
            return Kind.DOCUMENT


def _pooled(step: _Step) -> Kind | None:
    if Kind.POOLED not in step.operands:
        return None
    if step.operands & {Kind.TOKENS, Kind.MASK}:
        raise _refused(step.node, "brings the pooled document back to its tokens")
    return Kind.POOLED


def _mask(step: _Step) -> Kind | None:
    op_type, operands = step.node.op_type, step.operands
    if Kind.TOKENS in operands:
        return None
    is_layout = op_type in (*_LAYOUTS, "Reshape")
    if is_layout and step.kinds[step.node.input[0]] is Kind.MASK:
        return Kind.MASK
    is_of_masks = operands <= {Kind.MASK, Kind.FILL, Kind.CONSTANT}
    return Kind.MASK if op_type in _ELEMENTWISE and is_of_masks else None


def _pooling(step: _Step) -> Kind | None:
    return Kind.POOLED if pooling(step.node, step.constants) is not None else None


def _tokens(step: _Step) -> Kind | None:
    if step.operands & {Kind.LENGTH, Kind.DOCUMENT}:
        raise _refused(step.node, "scales tokens by the document's length")
    acts = _acts_on_each_token(step.node, step.kinds, step.constants)
    return Kind.TOKENS if Kind.TOKENS in step.operands and acts else None


_RULES: tuple[Callable[[_Step], Kind | None], ...] = (
    _attention,
    _constant,
    _shape,
    _positions,
    _size,
    _pooled,
    _mask,
    _pooling,
    _tokens,
)
"""Rules in their order: each returns a kind, None if it does not apply, or raises."""


def _acts_on_each_token(
    node: onnx.NodeProto, kinds: Mapping[str, Kind], constants: Mapping[str, Array]
) -> bool:
    axis = next((a.i for a in node.attribute if a.name == "axis"), None)
    operands = list(_shapes(node, kinds, constants))
    if node.op_type in _ELEMENTWISE:
        # A constant with an axis of tokens fits only one length.
        return all(map(_has_no_tokens, operands))
    match node.op_type:
        case "MatMul":
            return kinds[node.input[0]] is Kind.TOKENS and [len(s) for s in operands] == [2]
        case "Gather":
            return kinds[node.input[0]] is Kind.CONSTANT and axis in (None, 0)
        case "Concat" | "Split":
            return axis == -1 and not operands
        case _:
            return node.op_type in _LAST_AXIS and axis in (None, -1)


def _has_no_tokens(shape: tuple[int, ...]) -> bool:
    return len(shape) < 2 or shape[-2] == 1


def _shapes(
    node: onnx.NodeProto, kinds: Mapping[str, Kind], constants: Mapping[str, Array]
) -> Iterator[tuple[int, ...]]:
    for name in node.input:
        if name and kinds[name] is Kind.CONSTANT:
            yield constants[name].shape if name in constants else (0, 0)


def _refused(node: onnx.NodeProto, reason: str) -> NotChunkable:
    return NotChunkable(f"{node.op_type} ({node.output[0]}) {reason}")
