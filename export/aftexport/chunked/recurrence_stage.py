"""The graphs of one recurrence, or of one causal convolution, in chunks.

Its state is the summary of all tokens on one side of a chunk. A forward recurrence needs the state
of the tokens on the left, a reverse one that on the right, and a bidirectional one both. The state
of a convolution is its last inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from aftexport.bundle.chunked_plan import ChunkedStage, Recurrence
from aftexport.chunked.graph_parts import GraphParts
from aftexport.chunked.recurrence_states import LEFT_STATE, NEXT_STATE, RIGHT_STATE
from aftexport.contract import LENGTHS
from aftexport.operators.mechanisms import RECURRENT_OPERATORS
from aftexport.passes.token_kinds import NotChunkable

_FLOAT = onnx.TensorProto.FLOAT
_LENGTHS = -1
"""The place of the lengths, the last input of each operator."""


@dataclass(frozen=True)
class RecurrenceStage:
    """One recurrence or convolution.

    Attributes:
        apply: the graph from kept values and states to the next kept values and, unless the
            recurrence is reverse, to the state for the next chunk on the right.
        advance: the graph from kept values and the state on the right to the state for the next
            chunk on the left; None if the recurrence is forward.
        keeps: the names of values kept from before the recurrence for after it.
        recurrence: its direction and the shape of its state.
    """

    apply: onnx.ModelProto
    advance: onnx.ModelProto | None
    keeps: tuple[str, ...]
    recurrence: Recurrence

    @property
    def graphs(self) -> dict[str, onnx.ModelProto]:
        """The graphs by their names in the archive, without the number of the stage."""
        if self.advance is None:
            return {"apply": self.apply}
        return {"advance": self.advance, "apply": self.apply}

    @property
    def plan(self) -> ChunkedStage:
        """The description of the stage in the manifest."""
        return ChunkedStage(
            left=0,
            right=0,
            causal=self.recurrence.direction == "forward",
            keeps=self.keeps,
            recurrence=self.recurrence,
        )


def make_recurrence_stage(
    parts: GraphParts, node: onnx.NodeProto, kept: list[str], after: list[str]
) -> RecurrenceStage:
    """Return the graphs of a recurrence.

    Args:
        parts: the graph of the model.
        node: the operator.
        kept: the values before it, which suffice for the model's later nodes.
        after: the values that suffice after it.

    Raises:
        NotChunkable: if the shape of a state is unknown.
    """
    recurrence = _READERS[node.op_type](parts, node)
    return RecurrenceStage(
        _apply(parts, node, kept, after, recurrence),
        None if recurrence.direction == "forward" else _advance(parts, node, kept, recurrence),
        tuple(name for name in after if name in kept and name != parts.main),
        recurrence,
    )


def _apply(
    parts: GraphParts,
    node: onnx.NodeProto,
    kept: list[str],
    after: list[str],
    recurrence: Recurrence,
) -> onnx.ModelProto:
    new = [name for name in after if name not in kept]
    graph = parts.subgraph([*kept, *parts.given], new)
    place = next(i for i, n in enumerate(graph.node) if n.output[0] == node.output[0])
    before, after_it = list(graph.node[:place]), list(graph.node[place + 1 :])
    make, direction = onnx.helper.make_node, recurrence.direction
    past, present = {
        "forward": (LEFT_STATE, NEXT_STATE),
        "reverse": (RIGHT_STATE, "chunk_last_state"),
        "bidirectional": ("chunk_states", "chunk_last_states"),
    }[direction]
    both, split = [], []
    if direction == "bidirectional":
        both = [make("Concat", [LEFT_STATE, RIGHT_STATE], [past], axis=1)]
        split = [make("Split", [present, "chunk_halves"], [NEXT_STATE, "chunk_unused"], axis=1)]
        halves = np.array([recurrence.shape[0]] * 2)
        graph.initializer.append(onnx.numpy_helper.from_array(halves, "chunk_halves"))
    own = [*_in_float32(node), *both, _with_state(node, past, present, "chunk_result"), *split]
    like = make("CastLike", ["chunk_result", node.input[0]], [node.output[0]])
    del graph.node[:]
    graph.node.extend([*before, *own, like, *after_it])
    if direction != "reverse":
        _add_input(graph, LEFT_STATE, recurrence)
        graph.output.append(_described(NEXT_STATE, recurrence))
    if direction != "forward":
        _add_input(graph, RIGHT_STATE, recurrence)
    _add_lengths(parts, graph)
    return parts.model(graph)


def _advance(
    parts: GraphParts, node: onnx.NodeProto, kept: list[str], recurrence: Recurrence
) -> onnx.ModelProto:
    """Return the graph of the states in reverse, whose queries are the keys: any would do."""
    reverse = onnx.NodeProto()
    reverse.CopyFrom(node)
    reverse.input[0] = node.input[1]
    settings = {a.name: a for a in reverse.attribute}
    _set(reverse, "direction", "reverse")
    _set(reverse, "q_num_heads", settings["kv_num_heads"].i)
    sources = [name for name in reverse.input[1:_LENGTHS] if name]
    graph = parts.subgraph([*kept, *parts.given], sources)
    graph.node.extend(
        [*_in_float32(reverse), _with_state(reverse, RIGHT_STATE, NEXT_STATE, "chunk_result")]
    )
    del graph.output[:]
    graph.output.append(_described(NEXT_STATE, recurrence))
    _add_input(graph, RIGHT_STATE, recurrence)
    _add_lengths(parts, graph)
    return parts.model(graph)


def _in_float32(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [
        onnx.helper.make_node("Cast", [name], [f"chunk_input_{place}"], to=_FLOAT)
        for place, name in enumerate(node.input[:_LENGTHS])
        if name
    ]


def _with_state(node: onnx.NodeProto, past: str, present: str, result: str) -> onnx.NodeProto:
    """Return the operator with the inputs of ``_in_float32``, all tokens, and states."""
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    for place, name in enumerate(node.input[:_LENGTHS]):
        copied.input[place] = f"chunk_input_{place}" if name else ""
    copied.input[RECURRENT_OPERATORS[node.op_type].inputs.index("past_state")] = past
    copied.input[_LENGTHS] = LENGTHS
    del copied.output[:]
    copied.output.extend([result, present])
    return copied


def _set(node: onnx.NodeProto, name: str, value: str | int) -> None:
    others = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*others, onnx.helper.make_attribute(name, value)])


def _described(name: str, recurrence: Recurrence) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, _FLOAT, (1, *recurrence.shape))


def _add_input(graph: onnx.GraphProto, name: str, recurrence: Recurrence) -> None:
    graph.input.append(_described(name, recurrence))


def _add_lengths(parts: GraphParts, graph: onnx.GraphProto) -> None:
    if not any(value.name == LENGTHS for value in graph.input):
        graph.input.append(parts.lengths)


def _of_linear_attention(parts: GraphParts, node: onnx.NodeProto) -> Recurrence:
    settings = RECURRENT_OPERATORS[node.op_type].attributes_of(node)
    heads = int(settings["kv_num_heads"])
    widths = [parts.dims[name][-1] for name in node.input[1:3]]
    if not all(isinstance(width, int) for width in widths):
        raise NotChunkable(f"{node.op_type} ({node.output[0]}) has keys of unknown width")
    key, value = (int(width) // heads for width in widths)
    normalizer = settings["normalizer"] == "sum"
    shape = (heads, key, value + normalizer)
    return Recurrence.model_validate({"direction": settings["direction"], "shape": shape})


def _of_convolution(parts: GraphParts, node: onnx.NodeProto) -> Recurrence:
    weight = parts.constants.get(node.input[1])
    if weight is None:
        raise NotChunkable(f"the weight of {node.op_type} ({node.output[0]}) is computed")
    channels, taps = weight.shape
    return Recurrence(direction="forward", shape=(taps - 1, channels))


_READERS: Mapping[str, Callable[[GraphParts, onnx.NodeProto], Recurrence]] = {
    "RecurrentLinearAttention": _of_linear_attention,
    "CausalDepthwiseConv": _of_convolution,
}
