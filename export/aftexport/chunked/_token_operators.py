"""Operators that act on every token separately."""

from collections.abc import Sequence

from aftexport.chunked.token_kinds import OF_DOCUMENT, Kind, Step, refused
from aftexport.lowering.token_reductions import is_reduction_over_channels

ELEMENTWISE = frozenset((
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Cos", "Div", "Elu", "Equal",
    "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish",
    "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mul", "Neg",
    "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign",
    "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tanh", "Where",
))  # fmt: skip
_LAST_AXIS = frozenset(("LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax"))


def check_scale(step: Step) -> None:
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


def acts_on_each_token(step: Step) -> bool:
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
        return all(has_no_tokens(shape, rank) for shape in shared)
    match node.op_type:
        case "MatMul":
            # Each document may have a matrix of its own.
            is_matrix = [len(shape) for shape in shared] == [
                3 if kinds[step.inputs[1]] in OF_DOCUMENT else 2
            ]
            return is_matrix and _is_of_tokens(step, step.inputs[0])
        case "Gather":
            return kinds[step.inputs[0]] is Kind.CONSTANT and axis in (None, 0)
        case "Concat":
            return is_of_channels and not shared
        case "Split":
            return is_of_channels and len(shared) == len(step.inputs) - 1
        case _ if node.op_type in _LAST_AXIS:
            return (axis is None and not is_flat) or is_of_channels
        case _:
            return not is_flat and is_reduction_over_channels(node, step.constants, rank)


def _is_of_heads(step: Step) -> bool:
    """Return whether each operand is ``[B, T, H, C]`` or a constant."""
    others = [name for name in step.inputs if step.kinds[name] is not Kind.CONSTANT]
    return all(len(step.dims.get(name, ())) == 4 for name in others)


def _is_of_tokens(step: Step, name: str) -> bool:
    return step.kinds[name] not in (Kind.CONSTANT, *OF_DOCUMENT)


def has_no_tokens(shape: Sequence[str | int], rank: int = 3) -> bool:
    """Return whether a value is the same for every token of a value with ``rank`` axes."""
    return len(shape) < rank - 1 or shape[1 - rank] == 1


def _shape_of(step: Step, name: str, rank: int) -> Sequence[str | int]:
    """Return the axes of a constant or a document's value; those behind ``B`` are 0 if unknown."""
    if name in step.constants:
        return step.constants[name].shape
    shape = step.dims.get(name) if step.kinds[name] in OF_DOCUMENT else None
    # Numbers for each document are added to its tokens only with an axis for the tokens.
    return shape if shape is not None and len(shape) == rank else (0,) * (rank - 1)
