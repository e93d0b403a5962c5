"""Tells, of every value in a graph, what it is made of; refuses what no chunk can compute.

A graph can be cut where each of its nodes acts on every token alone, is one of our attentions,
or reduces the tokens by an associative operation, and where a chunk's own length may stand for
the document's: in masks of padding, which a chunk has none of.
"""

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.bundle.manifest import Pooling
from aftexport.operators.domain import DOMAIN

Array = NDArray[np.generic]


class WholeOnlyError(Exception):
    """Why a model's documents cannot be taken apart."""


class Kind(Enum):
    """What a value is made of."""

    CONSTANT = auto()
    FILL = auto()
    """Constants in a shape that the document's length decides, the same for every token."""
    LENGTH = auto()
    """The number of the document's tokens."""
    DOCUMENT = auto()
    """What else follows from the number of tokens or of documents."""
    POSITIONS = auto()
    """The place of every token, the first is 0."""
    MASK = auto()
    """Which places are a document's own, ``[B, T, ...]``."""
    TOKENS = auto()
    """``[B, T]`` or ``[B, T, C]``, each token's from that token alone, or an attention's."""
    POOLED = auto()
    """``[B, ...]``, of the whole document."""


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
    """Returns the kind of every value of a graph.

    Raises:
        WholeOnlyError: naming the node that stands against it.
    """
    constants = constants_of(model.graph)
    kinds = dict.fromkeys(constants, Kind.CONSTANT)
    kinds.update({"": Kind.CONSTANT, "input_ids": Kind.TOKENS, "lengths": Kind.LENGTH})
    for node in model.graph.node:
        if any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute):
            raise WholeOnlyError(f"{node.op_type} ({node.output[0]}) branches or loops")
        kind = _kind(node, kinds, constants)
        kinds.update(dict.fromkeys(node.output, kind))
    for output in model.graph.output:
        if kinds[output.name] is not Kind.POOLED:
            raise WholeOnlyError(f"{output.name} is not pooled from the tokens")
    return kinds


def constants_of(graph: onnx.GraphProto) -> Mapping[str, Array]:
    """Initializers and the outputs of Constant nodes."""
    return _Constants(graph)


class _Constants(Mapping[str, Array]):
    """Makes an array only of what is asked for: all weights at once are another model in memory."""

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
    """How a node pools the tokens: ``sum``, ``max`` or ``first``; None where it does not."""
    if node.op_type == "Gather":
        index = constants.get(node.input[1])
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        return "first" if axis == 1 and index is not None and index.tolist() in (0, [0]) else None
    if is_sum_over_tokens(node, constants):
        return "sum"
    return "max" if node.op_type == "ReduceMax" and _reduces_tokens(node, constants) else None


def is_sum_over_tokens(node: onnx.NodeProto, constants: Mapping[str, Array]) -> bool:
    """Tells whether a node is a ReduceSum over axis 1 alone."""
    return node.op_type == "ReduceSum" and _reduces_tokens(node, constants)


def is_reduction_over_tokens(node: onnx.NodeProto, constants: Mapping[str, Array]) -> bool:
    """Tells whether a node is a ReduceSum or ReduceMean over axis 1 alone."""
    return node.op_type in ("ReduceSum", "ReduceMean") and _reduces_tokens(node, constants)


def _reduces_tokens(node: onnx.NodeProto, constants: Mapping[str, Array]) -> bool:
    axes = constants.get(node.input[1]) if len(node.input) > 1 else None
    return axes is not None and axes.tolist() == [1]


def _kind(node: onnx.NodeProto, kinds: Mapping[str, Kind], constants: Mapping[str, Array]) -> Kind:
    given = {kinds[name] for name in node.input}
    if node.domain == DOMAIN:
        return _attention(node, kinds)
    if given <= {Kind.CONSTANT}:
        return Kind.CONSTANT
    if node.op_type == "Shape":
        axes = {a.name: a.i for a in node.attribute}
        is_tokens = given == {Kind.TOKENS} and axes == {"start": 1, "end": 2}
        return Kind.LENGTH if is_tokens else Kind.DOCUMENT
    if Kind.POSITIONS in given:
        return _of_positions(node, kinds)
    if given <= _SIZES:
        return _size(node, kinds, constants)
    if Kind.TOKENS not in given:
        if Kind.POOLED in given:
            if Kind.MASK in given:
                raise _refused(node, "brings the pooled document back to its tokens")
            return Kind.POOLED
        if node.op_type in (*_LAYOUTS, "Reshape") and kinds[node.input[0]] is Kind.MASK:
            return Kind.MASK
        if node.op_type in _ELEMENTWISE and given <= {Kind.MASK, Kind.FILL, Kind.CONSTANT}:
            return Kind.MASK
    if Kind.POOLED in given:
        raise _refused(node, "brings the pooled document back to its tokens")
    if pooling(node, constants) is not None:
        return Kind.POOLED
    if given & {Kind.LENGTH, Kind.DOCUMENT}:
        raise _refused(node, "scales tokens by the document's length")
    if Kind.TOKENS not in given or not _acts_on_each_token(node, kinds, constants):
        raise _refused(node, "is not known to act on each token alone")
    return Kind.TOKENS


def _attention(node: onnx.NodeProto, kinds: Mapping[str, Kind]) -> Kind:
    operands = {kinds[name] for name in node.input[:3]}
    if not operands <= {Kind.TOKENS, Kind.MASK, Kind.FILL}:
        raise _refused(node, "attends to more than what each token is alone")
    if kinds[node.input[-1]] is not Kind.LENGTH:
        raise _refused(node, "attends to other tokens than the document has")
    return Kind.TOKENS


def _of_positions(node: onnx.NodeProto, kinds: Mapping[str, Kind]) -> Kind:
    if node.op_type in ("Cast", "Unsqueeze"):
        return Kind.POSITIONS
    pair = [kinds[name] for name in node.input]
    if node.op_type in ("Greater", "LessOrEqual"):
        pair.reverse()
    elif node.op_type not in ("Less", "GreaterOrEqual"):
        pair.clear()
    if pair != [Kind.POSITIONS, Kind.LENGTH]:  # no other says the same of every token there is
        raise _refused(node, "uses the positions of tokens")
    return Kind.MASK


def _size(node: onnx.NodeProto, kinds: Mapping[str, Kind], constants: Mapping[str, Array]) -> Kind:
    first, *rest = node.input
    match node.op_type:
        case "Range":
            limit, step = rest
            counts = constants.get(first) == 0 and constants.get(step) == 1
            return Kind.POSITIONS if counts and kinds[limit] is Kind.LENGTH else Kind.DOCUMENT
        case "Clip":
            # A document has one token or more.
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


def _acts_on_each_token(
    node: onnx.NodeProto, kinds: Mapping[str, Kind], constants: Mapping[str, Array]
) -> bool:
    axis = next((a.i for a in node.attribute if a.name == "axis"), None)
    operands = list(_shapes(node, kinds, constants))
    if node.op_type in _ELEMENTWISE:
        # What has an axis of tokens of its own is made for one length.
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


def _refused(node: onnx.NodeProto, why: str) -> WholeOnlyError:
    return WholeOnlyError(f"{node.op_type} ({node.output[0]}) {why}")
