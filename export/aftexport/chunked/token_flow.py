"""The kind of every value in a graph, for documents in chunks.

A graph can be computed in chunks if each of its nodes acts on every token separately, is one of our
attentions or recurrences, or reduces the tokens by an associative operation. After the last
attention, a node may also act on every token together with the pooled document. A chunk has no
padding, so its own length can replace the document's only in masks of padding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import onnx_ir as ir

from aftexport.lowering.evidence import TIES
from aftexport.lowering.graph_values import (
    Array,
    Axes,
    axes_of,
    constants_of,
    dims_of,
    is_reduction_over_channels,
    main_input_of,
    names_of,
    pooling,
)
from aftexport.operators.domain import DOMAIN
from aftexport.operators.mechanisms import RECURRENT_OPERATORS
from aftexport.operators.mechanisms.softmax_attention import SOFTMAX_ATTENTION
from aftexport.system.contract import LENGTHS


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
    POSITION_EMBEDDING = auto()
    """A row of learned constants for each position, ``[T, C]`` or ``[1, T, C]``."""
    ANGLES = auto()
    """Numbers computed from each position, in any layout, for the rotation by softmax attention."""
    MASK = auto()
    """A mask of the document's own positions, without padding, ``[B, T, ...]``."""
    TOKENS = auto()
    """``[B, T]`` or ``[B, T, C]``, computed from each token separately, or by an attention."""
    PADDED = auto()
    """``[B, T + n, C]``, of each token and of further rows; a node takes the largest of them."""
    HEADS = auto()
    """``[B, T, H, C]``, computed from each token separately."""
    GIVEN = auto()
    """``[B, ...]``, computed from inputs of the document only, which are known from the start."""
    POOLED = auto()
    """``[B, ...]``, computed from the whole document."""
    STATE = auto()
    """The last state of a recurrence, or the sums of the weights of a softmax attention."""
    MARKS = auto()
    """A number for each token, ``[B, T]``, computed from its id and its position only."""
    PLACE = auto()
    """The place of the token with the largest mark, also as an index ``[B, 2]``."""
    COMBINED = auto()
    """``[B, T, ...]``, computed from each token and the pooled document, after all attentions."""


OF_TOKENS = frozenset((Kind.TOKENS, Kind.COMBINED))
"""The kinds of outputs that have a row for each token."""
EACH_TOKEN = frozenset((Kind.TOKENS, Kind.HEADS))
"""The kinds of values computed from each token separately."""
OF_DOCUMENT = frozenset((Kind.GIVEN, Kind.POOLED))
"""The kinds of values that a document has only once."""
SIZES = frozenset((Kind.CONSTANT, Kind.FILL, Kind.LENGTH, Kind.DOCUMENT))
"""The kinds of values that may be sizes of a shape."""


@dataclass(frozen=True)
class Step:
    """A node of a graph, with the kinds of all values before it."""

    node: ir.Node
    kinds: Mapping[str, Kind]
    constants: Mapping[str, Array]
    dims: Mapping[str, Axes]  # the axes of all values
    document: Axes  # the axes of documents and tokens

    @property
    def operands(self) -> set[Kind]:
        """The kinds of the inputs."""
        return {self.kinds[name] for name in self.inputs}

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs; "" for one that the node leaves out."""
        return names_of(self.node.inputs)

    @property
    def result(self) -> str:
        """The name of the first output."""
        return str(self.node.outputs[0].name)


def refused(node: ir.Node, reason: str) -> NotChunkable:
    """Return the exception that names a node with the reason against it."""
    return NotChunkable(f"{node.op_type} ({node.outputs[0].name}) {reason}")


_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_LAYOUTS = frozenset(("Cast", "Expand", "Identity", "Squeeze", "Unsqueeze"))


def classify(graph: ir.Graph) -> dict[str, Kind]:
    """Return the kind of every value of a graph; raise NotChunkable if a node needs all of it."""
    constants = constants_of(graph)
    dims = dims_of(graph)
    document = axes_of(main_input_of(graph))[:2]
    kinds = dict.fromkeys(constants, Kind.CONSTANT)
    for name in names_of(graph.inputs):
        kinds[name] = Kind.TOKENS if dims[name][:2] == document else Kind.GIVEN
    kinds.update({"": Kind.CONSTANT, LENGTHS: Kind.LENGTH})
    for node in graph:
        if any(a.type in _GRAPHS for a in node.attributes.values()):
            raise refused(node, "branches or loops")
        kind = _kind(Step(node, kinds, constants, dims, document))
        outputs = names_of(node.outputs)
        kinds.update(dict.fromkeys(outputs, kind))
        if is_recurrence(node) or is_softmax(node):
            kinds.update(dict.fromkeys(outputs[1:], Kind.STATE))
    for name in names_of(graph.outputs):
        if kinds[name] not in (Kind.POOLED, *OF_TOKENS):
            raise NotChunkable(
                f"{name} is neither pooled from the tokens nor computed for each token"
            )
    return kinds


def _kind(step: Step) -> Kind:
    """Return the kind of a node's outputs, by the first rule that applies."""
    kinds = (rule(step) for rule in _RULES)
    kind = next((kind for kind in kinds if kind is not None), None)
    if kind is None:
        raise refused(step.node, "is not known to act on each token alone")
    return kind


def is_recurrence(node: ir.Node) -> bool:
    """Return whether an operator passes a state from each token to the next."""
    return node.domain == DOMAIN and node.op_type in RECURRENT_OPERATORS


def _state(step: Step) -> Kind | None:
    if Kind.STATE in step.operands:
        raise refused(
            step.node, "uses the last state of a recurrence or the sums of an attention's weights"
        )
    return None


def _attention(step: Step) -> Kind | None:
    node, kinds = step.node, step.kinds
    if node.domain != DOMAIN:
        return None
    operands = {kinds[name] for name in _sequences(step)}
    if Kind.COMBINED in operands:
        raise refused(node, "attends to tokens that depend on the pooled document")
    if not operands <= {Kind.TOKENS, Kind.MASK, Kind.FILL}:
        raise refused(node, "attends to values that are not computed token by token")
    lengths = step.inputs[-1]
    if is_softmax(node):
        lengths = _lengths_of_softmax(step)
    if kinds[lengths] is not Kind.LENGTH:
        raise refused(node, "attends to other tokens than the document has")
    return Kind.TOKENS


def is_softmax(node: ir.Node) -> bool:
    """Return whether an operator is softmax attention, whose keys have no summary."""
    return node.domain == DOMAIN and node.op_type == SOFTMAX_ATTENTION.op_type


def inputs_of_softmax(node: ir.Node) -> Mapping[str, str]:
    """Return the names of the inputs of a softmax attention; "" for those that it leaves out."""
    given = names_of(node.inputs)
    given += [""] * (len(SOFTMAX_ATTENTION.inputs) - len(given))
    return dict(zip(SOFTMAX_ATTENTION.inputs, given, strict=True))


_OF_SOFTMAX = {
    **dict.fromkeys(("sink", "bias"), (Kind.CONSTANT,)),
    **dict.fromkeys(
        ("cos_cache", "sin_cache"), (Kind.CONSTANT, Kind.POSITION_EMBEDDING, Kind.ANGLES)
    ),
}
"""The kinds that further inputs of a softmax attention may have."""


def _lengths_of_softmax(step: Step) -> str:
    """Return the lengths of a softmax attention, after a check of its other inputs."""
    inputs = inputs_of_softmax(step.node)
    for name, kinds in _OF_SOFTMAX.items():
        if step.kinds[inputs[name]] not in kinds:
            raise refused(step.node, f"has a computed {name}")
    has_other_keys = inputs["key_lengths"] or inputs["query_start"]
    return "" if has_other_keys else inputs["lengths"]


def _sequences(step: Step) -> Sequence[str]:
    """Return the inputs of an operator of ours that have to be computed token by token."""
    node = step.node
    if not is_recurrence(node):
        return step.inputs[:3]
    if "past_state" in RECURRENT_OPERATORS[node.op_type].present_in(ir.to_proto(node)):
        raise refused(node, "gets its first state from the model")
    if node.op_type == "CausalDepthwiseConv":
        if any(step.kinds[name] is not Kind.CONSTANT for name in step.inputs[1:3]):
            raise refused(node, "has computed weights")
        return step.inputs[:1]
    return [name for name in step.inputs[:-1] if name]


def _constant(step: Step) -> Kind | None:
    return Kind.CONSTANT if step.operands <= {Kind.CONSTANT} else None


def _shape(step: Step) -> Kind | None:
    if step.node.op_type != "Shape":
        return None
    axes = {name: a.value for name, a in step.node.attributes.items()}
    is_tokens = step.operands <= EACH_TOKEN and axes == {"start": 1, "end": 2}
    return Kind.LENGTH if is_tokens else Kind.DOCUMENT


def _layout(step: Step) -> Kind | None:
    """Return the kind of the same values of each token with other axes behind ``[B, T]``."""
    node, document = step.node, step.document
    if node.op_type not in ("Reshape", "Squeeze", "Unsqueeze") or not step.inputs[0]:
        return None
    if step.kinds[step.inputs[0]] not in EACH_TOKEN:
        return None
    before, after = (step.dims.get(name, []) for name in (step.inputs[0], step.result))
    if before[:2] != document or after[:2] != document:
        return None
    return Kind.HEADS if len(after) > 3 else Kind.TOKENS


def _positions(step: Step) -> Kind | None:
    node = step.node
    if Kind.POSITIONS not in step.operands:
        return None
    if node.op_type in ("Cast", "Unsqueeze"):
        return Kind.POSITIONS
    if node.op_type in ("Mul", "MatMul") and step.operands == {Kind.POSITIONS, Kind.CONSTANT}:
        return Kind.ANGLES
    pair = [step.kinds[name] for name in step.inputs]
    if node.op_type in ("Greater", "LessOrEqual"):
        pair.reverse()
    elif node.op_type not in ("Less", "GreaterOrEqual"):
        pair.clear()
    # Only this comparison has the same result for all tokens of the document.
    if pair != [Kind.POSITIONS, Kind.LENGTH]:
        raise refused(node, "uses the positions of tokens")
    return Kind.MASK


_OF_ANGLES = frozenset((
    "Cast", "Concat", "Cos", "Div", "Gather", "Identity", "Mul", "Neg", "Reshape", "Sin", "Slice",
    "Squeeze", "Transpose", "Unsqueeze",
))  # fmt: skip
"""Operators that compute each position's numbers of an angle separately."""


def _angles(step: Step) -> Kind | None:
    if Kind.ANGLES not in step.operands:
        return None
    if step.node.op_type in _OF_ANGLES and step.operands <= {Kind.ANGLES, Kind.CONSTANT}:
        return Kind.ANGLES
    raise refused(step.node, "uses the positions of tokens")


def is_position_embedding(
    node: ir.Node, kinds: Mapping[str, Kind], constants: Mapping[str, Array]
) -> bool:
    """Return whether a node reads a row of a constant table ``[N, C]`` for each position."""
    # A Gather has the positions as indices; a Slice takes the first rows, one for each token.
    first, *others = names_of(node.inputs)
    table = constants.get(first)
    if table is None or table.ndim != 2:
        return False
    if node.op_type == "Gather":
        is_of_rows = node.attributes.get_int("axis", 0) == 0
        return is_of_rows and kinds[others[0]] is Kind.POSITIONS
    return _takes_first_rows(node, kinds, constants, axis=0)


def _takes_first_rows(
    node: ir.Node, kinds: Mapping[str, Kind], constants: Mapping[str, Array], *, axis: int
) -> bool:
    """Return whether a node takes the first rows along an axis, one for each token."""
    _, *others = names_of(node.inputs)
    if node.op_type != "Slice" or len(others) < 3:
        return False
    start, end, *axes_and_step = others
    wanted = ([axis], [1])
    has_values = all(
        constants[name].tolist() == value if name in constants else not name
        for name, value in zip(axes_and_step, wanted, strict=False)
    )
    is_first = start in constants and constants[start].tolist() == [0]
    return is_first and has_values and kinds[end] is Kind.LENGTH


def _position_ids(step: Step) -> Kind | None:
    """Return the kind of the first numbers of a table ``[1, N]`` of all positions."""
    table = step.constants.get(step.inputs[0])
    if table is None or not _takes_first_rows(step.node, step.kinds, step.constants, axis=1):
        return None
    return Kind.POSITIONS if np.array_equal(table, [np.arange(table.size)]) else None


def _position_embedding(step: Step) -> Kind | None:
    """Return the kind of an embedding of positions, or of tokens to which one is added."""
    node, kinds = step.node, step.kinds
    if is_position_embedding(node, kinds, step.constants):
        return Kind.POSITION_EMBEDDING
    if Kind.POSITION_EMBEDDING not in step.operands:
        return None
    shape = step.dims.get(step.result, [])
    others = [name for name in step.inputs if kinds[name] is not Kind.POSITION_EMBEDDING]
    if node.op_type in ("Cast", "Unsqueeze") and shape[-2:-1] == step.document[1:]:
        return Kind.POSITION_EMBEDDING
    if node.op_type in ELEMENTWISE and others:
        if all(kinds[name] is Kind.TOKENS for name in others) and shape[:2] == step.document:
            return Kind.TOKENS
        if all(name in step.constants and step.constants[name].ndim < 2 for name in others):
            return Kind.POSITION_EMBEDDING
    raise refused(node, "uses the positions of tokens")


def _fill(step: Step) -> Kind | None:
    """Return the kind of rows of a table with equal numbers, or of one and the same row for all."""
    node, kinds, (first, *rest) = step.node, step.kinds, step.inputs
    table = step.constants.get(first)
    if table is None or node.op_type not in ("Gather", "GatherElements", "Slice"):
        return None
    of_places = {*SIZES, Kind.POSITIONS, Kind.POSITION_EMBEDDING}
    is_even = table.size > 0 and (table == table.flat[0]).all()
    if is_even and {kinds[name] for name in rest} <= of_places:
        return Kind.FILL
    is_row = node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0
    return Kind.FILL if is_row and kinds[rest[0]] is Kind.FILL else None


def _marks(step: Step) -> Kind | None:
    """Return the kind of marks, such as the positions of all tokens that are not padding."""
    node, operands = step.node, step.operands
    if Kind.MARKS in operands and node.op_type == "ArgMax":
        return None
    of_tokens = operands & {Kind.TOKENS, Kind.MASK}
    if Kind.MARKS not in operands and not (Kind.POSITIONS in operands and of_tokens):
        return None
    is_of_ids = node.op_type in ELEMENTWISE and all(
        _is_of_ids(step, value) for value in node.inputs if value is not None
    )
    if is_of_ids and step.dims.get(step.result) == step.document:
        return Kind.MARKS
    raise refused(node, "uses the positions of tokens")


def _is_of_ids(step: Step, value: ir.Value) -> bool:
    """Return whether a value is known without the results of any attention."""
    kind, node = step.kinds[str(value.name)], value.producer()
    if kind is not Kind.TOKENS:
        return kind in (Kind.CONSTANT, Kind.FILL, Kind.MASK, Kind.MARKS, Kind.POSITIONS)
    if node is None:
        return True
    inputs = (operand for operand in node.inputs if operand is not None)
    return node.op_type in ELEMENTWISE and all(_is_of_ids(step, operand) for operand in inputs)


def _place(step: Step) -> Kind | None:
    """Return the kind of the place of the largest mark, and of the value of the token there."""
    node, operands = step.node, step.operands
    if node.op_type == "ArgMax" and operands <= {Kind.MARKS, Kind.TOKENS}:
        return Kind.PLACE if _chooses_token(step) else None
    if Kind.PLACE not in operands:
        return None
    kinds = [step.kinds[name] for name in step.inputs]
    of_sizes = operands <= {Kind.PLACE, Kind.CONSTANT, Kind.DOCUMENT}
    match node.op_type:
        # A chunk has one document, so that the last number of its index is the place.
        case "Concat" if of_sizes and node.attributes.get_int("axis", 0) in (-1, 1):
            if len(kinds) == 2 and kinds.index(Kind.PLACE) == 1:
                return Kind.PLACE
        case layout if layout in (*_LAYOUTS, "Reshape") and of_sizes:
            if kinds[0] is Kind.PLACE and not _is_index(node.inputs[0]):
                return Kind.PLACE
        case "GatherND" if kinds == [Kind.TOKENS, Kind.PLACE] and _is_index(node.inputs[1]):
            if node.attributes.get_int("batch_dims", 0) == 0:
                return Kind.POOLED
    raise refused(node, "uses the place of a token")


def _is_index(place: ir.Value | None) -> bool:
    """Return whether a place is an index ``[B, 2]``, with the number of the document."""
    node = None if place is None else place.producer()
    return node is not None and node.op_type == "Concat"


def _chooses_token(step: Step) -> bool:
    """Return whether an ArgMax has the first token with the largest mark of each document."""
    (marks,) = step.node.inputs
    attributes = step.node.attributes
    is_first = not attributes.get_int("select_last_index", 0)
    is_of_tokens = attributes.get_int("axis", 0) in (-1, 1)
    is_flat = step.dims.get(step.inputs[0]) == step.document
    return is_first and is_of_tokens and is_flat and marks is not None and _is_of_ids(step, marks)


def _size(step: Step) -> Kind | None:
    node, kinds, constants = step.node, step.kinds, step.constants
    if not step.operands <= SIZES:
        return None
    first, *rest = step.inputs
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


def _given(step: Step) -> Kind | None:
    node, kinds = step.node, step.kinds
    if Kind.GIVEN not in step.operands:
        return None
    if step.operands <= {Kind.GIVEN, Kind.CONSTANT}:
        return Kind.GIVEN
    first, *sizes = step.inputs
    is_layout = node.op_type in ("Expand", "Reshape") and kinds[first] is Kind.GIVEN
    if not is_layout or not all(kinds[name] in SIZES for name in sizes):
        return None
    if _repeats_for_tokens(step):
        return Kind.TOKENS
    shape = step.dims.get(step.result)
    has_tokens = shape is None or step.document[1] in shape
    return None if has_tokens else Kind.GIVEN


def _ties(step: Step) -> Kind | None:
    return Kind.POOLED if step.result == TIES else None


def _combined(step: Step) -> Kind | None:
    node, operands = step.node, step.operands
    has_rows = step.dims.get(step.result, [])[:2] == step.document
    has_tokens = operands & {*EACH_TOKEN, Kind.MASK} or (has_rows and Kind.FILL in operands)
    if _repeats_document(step):
        return Kind.COMBINED
    if not (Kind.COMBINED in operands or (Kind.POOLED in operands and has_tokens)):
        return None
    _check_scale(step)
    if not (has_rows and _acts_on_each_token(step)):
        raise refused(
            node, "brings the pooled document back to its tokens and does not act on each of them"
        )
    return Kind.COMBINED


def _repeats_document(step: Step) -> bool:
    """Return whether a node repeats ``[B, 1, C]`` of the pooled document for every token."""
    return step.kinds[step.inputs[0]] is Kind.POOLED and _repeats_for_tokens(step)


def _repeats_for_tokens(step: Step) -> bool:
    """Return whether a node repeats ``[B, 1, C]`` for every token."""
    node, dims = step.node, step.dims
    if node.op_type != "Expand":
        return False
    before, after = (dims.get(name, []) for name in (step.inputs[0], step.result))
    return len(before) == 3 and before[1] == 1 and after[:2] == step.document


def _pooled(step: Step) -> Kind | None:
    return Kind.POOLED if Kind.POOLED in step.operands else None


def _mask(step: Step) -> Kind | None:
    op_type, operands = step.node.op_type, step.operands
    if operands & EACH_TOKEN:
        return None
    is_layout = op_type in (*_LAYOUTS, "Reshape")
    if is_layout and step.kinds[step.inputs[0]] is Kind.MASK:
        return Kind.MASK
    is_of_masks = operands <= {Kind.MASK, Kind.FILL, Kind.CONSTANT}
    return Kind.MASK if op_type in ELEMENTWISE and is_of_masks else None


def _padding(step: Step) -> Kind | None:
    """Return the kind of tokens with enough rows behind them for the largest values of a chunk."""
    node, constants = step.node, step.constants
    if node.op_type != "Pad" or step.kinds[step.inputs[0]] is not Kind.TOKENS:
        return None
    readers = [use.node for use in node.outputs[0].uses()]
    if not all(pooling(reader, constants) == "top_k" for reader in readers):
        return None
    pads = constants.get(step.inputs[1])
    wanted = [constants.get(names_of(reader.inputs)[1]) for reader in readers]
    if pads is None or pads.size != 6:
        return None
    rows = int(pads[4])
    is_enough = all(count is not None and count.item() <= rows for count in wanted)
    return Kind.PADDED if is_enough and np.abs(pads).sum() == rows else None


def _pooling(step: Step) -> Kind | None:
    how = pooling(step.node, step.constants)
    if Kind.HEADS in step.operands or how is None:
        return None
    if how == "top_k" and Kind.PADDED not in step.operands:
        raise refused(step.node, "takes more values than a chunk may have tokens")
    return Kind.POOLED


def _tokens(step: Step) -> Kind | None:
    _check_scale(step)
    kinds = step.operands & EACH_TOKEN
    if not kinds or not _acts_on_each_token(step):
        return None
    return Kind.HEADS if Kind.HEADS in kinds else Kind.TOKENS


_RULES: tuple[Callable[[Step], Kind | None], ...] = (
    _state,
    _attention,
    _constant,
    _shape,
    _layout,
    _position_ids,
    _fill,
    _marks,
    _place,
    _position_embedding,
    _positions,
    _angles,
    _size,
    _given,
    _ties,
    _combined,
    _pooled,
    _mask,
    _padding,
    _pooling,
    _tokens,
)
"""Rules in their order: each returns a kind, None if it does not apply, or raises."""


ELEMENTWISE = frozenset((
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Cos", "Div", "Elu", "Equal",
    "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish",
    "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mul", "Neg",
    "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign",
    "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tanh", "Where",
))  # fmt: skip
_LAST_AXIS = frozenset(("LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax"))


def _check_scale(step: Step) -> None:
    """Raise NotChunkable if the document's length is used other than as a shape."""
    sizes = step.operands & {Kind.LENGTH, Kind.DOCUMENT}
    if sizes and not _repeats_channels(step):
        raise refused(step.node, "scales tokens by the document's length")


def _repeats_channels(step: Step) -> bool:
    """Return whether a node only expands axes behind those of the tokens, ``[B, T]``."""
    node = step.node
    operand, result = (step.dims.get(name, []) for name in (step.inputs[0], step.result))
    is_same = len(operand) > 2 and operand[:2] == result[:2] == step.document
    return node.op_type == "Expand" and is_same


def _acts_on_each_token(step: Step) -> bool:
    """Return whether the result for each token depends on no other token."""
    node, kinds = step.node, step.kinds
    if node.op_type == "Expand":
        return _repeats_channels(step)
    rank = 4 if Kind.HEADS in step.operands else 3
    if rank == 4 and not _is_of_heads(step):
        return False
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else None
    is_behind_tokens = axis is not None and (axis % rank if -rank <= axis < 0 else axis) > 1
    # The last axis of [B, T] is that of the tokens.
    is_flat = any(
        len(step.dims.get(name, ())) == 2 for name in step.inputs if _is_of_tokens(step, name)
    )
    is_known = axis == -1 or rank == 4 or len(step.dims.get(step.result, ())) == 3
    is_of_channels = is_behind_tokens and is_known and not is_flat
    names = [name for name in step.inputs if name and not _is_of_tokens(step, name)]
    shared = [_shape_of(step, name, rank) for name in names]
    if node.op_type in ELEMENTWISE:
        # A constant with an axis of tokens fits only one length.
        return all(_has_no_tokens(shape, rank) for shape in shared)
    match node.op_type:
        case "MatMul":
            # Each document may have a matrix of its own.
            is_matrix = [len(shape) for shape in shared] == [
                3 if kinds[step.inputs[1]] in OF_DOCUMENT else 2
            ]
            return is_matrix and _is_of_tokens(step, step.inputs[0])
        case "Gather" if is_of_channels:
            return _is_of_tokens(step, step.inputs[0]) and step.inputs[1] in step.constants
        case "Gather":
            return kinds[step.inputs[0]] is Kind.CONSTANT and axis in (None, 0)
        case "Concat":
            return is_of_channels and not shared
        case "Split":
            return is_of_channels and len(shared) == len(step.inputs) - 1
        case "Slice":
            return not is_flat and _is_of_last_axis(step, rank)
        case _ if node.op_type in _LAST_AXIS:
            return (axis is None and not is_flat) or is_of_channels
        case _:
            return not is_flat and is_reduction_over_channels(node, step.constants, rank)


def _is_of_last_axis(step: Step, rank: int) -> bool:
    """Return whether a Slice takes constant channels of ``rank`` axes."""
    bounds = step.inputs[1:]
    if len(bounds) < 3 or any(name and name not in step.constants for name in bounds):
        return False
    return step.constants[bounds[2]].tolist() in ([-1], [rank - 1])


def _is_of_heads(step: Step) -> bool:
    """Return whether each operand is ``[B, T, H, C]`` or a constant."""
    others = [name for name in step.inputs if step.kinds[name] is not Kind.CONSTANT]
    return all(len(step.dims.get(name, ())) == 4 for name in others)


def _is_of_tokens(step: Step, name: str) -> bool:
    return step.kinds[name] not in (Kind.CONSTANT, *OF_DOCUMENT)


def _has_no_tokens(shape: Sequence[str | int], rank: int = 3) -> bool:
    """Return whether a value is the same for every token of a value with ``rank`` axes."""
    return len(shape) < rank - 1 or shape[1 - rank] == 1


def _shape_of(step: Step, name: str, rank: int) -> Sequence[str | int]:
    """Return the axes of a constant or a document's value; those behind ``B`` are 0 if unknown."""
    if name in step.constants:
        return step.constants[name].shape
    shape = step.dims.get(name) if step.kinds[name] in OF_DOCUMENT else None
    # Numbers for each document are added to its tokens only with an axis for the tokens.
    return shape if shape is not None and len(shape) == rank else (0,) * (rank - 1)
