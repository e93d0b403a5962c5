"""The graphs of one attention, of one recurrence or of one causal convolution, in chunks.

A recurrence has a state: the summary of all tokens on one side of a chunk. A forward recurrence
needs the state of the tokens on the left, a reverse one that on the right, and a bidirectional one
both. The state of a convolution is its last inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from aftexport.bundle.manifest import ChunkedStage, Recurrence
from aftexport.chunked.document import LEFT_STATE, NEXT_STATE, RIGHT_STATE
from aftexport.chunked.graph_parts import (
    ANY_TOKENS,
    FLOAT,
    GraphParts,
    first_position,
    given,
    number_of_tokens,
)
from aftexport.chunked.summaries import DOMAIN as SUMMARY_DOMAIN
from aftexport.chunked.summaries import Window, summary, window_of
from aftexport.chunked.token_kinds import NotChunkable
from aftexport.lowering.graph_values import names_of
from aftexport.lowering.nodes import NewNodes
from aftexport.operators.domain import MASKED
from aftexport.operators.mechanisms import RECURRENT_OPERATORS


@dataclass(frozen=True)
class Stage:
    """One attention.

    Attributes:
        reduce: the graph from kept values to ``few_keys`` and ``few_values`` of a chunk.
        merge: the graph from ``key`` and ``value`` of several summaries to those of one.
        apply: the graph from kept values, ``other_keys``, ``other_values`` and, for biases by
            position, ``FIRST_POSITION`` to the next kept values.
        window: the tokens around a chunk in the inputs of ``apply``.
        causal: whether a token attends only to itself and earlier tokens.
        keeps: the names of values kept from before the attention for after it.
    """

    reduce: ir.Model
    merge: ir.Model
    apply: ir.Model
    window: Window
    causal: bool
    keeps: tuple[str, ...]

    @property
    def graphs(self) -> dict[str, ir.Model]:
        """The graphs by their names in the archive, without the number of the stage."""
        return {"reduce": self.reduce, "merge": self.merge, "apply": self.apply}

    @property
    def plan(self) -> ChunkedStage:
        """The description of the stage in the manifest."""
        window = self.window
        return ChunkedStage(
            left=window.left,
            right=window.right,
            causal=self.causal,
            keeps=self.keeps,
            recurrence=None,
        )


def make_stage(parts: GraphParts, node: ir.Node, kept: list[str], after: list[str]) -> Stage:
    """Return the graphs of an attention.

    Args:
        parts: the graph of the model.
        node: the attention.
        kept: the values before it, which suffice for the model's later nodes.
        after: the values that suffice after it.

    Raises:
        NotChunkable: if the attention has no summary of a chunk.
    """
    causal = node.op_type.startswith("Causal")
    inputs = names_of(node.inputs)
    bias = parts.constants.get(inputs[3]) if len(inputs) > 4 else None
    window = window_of(node, causal, bias)
    function = summary(node, parts.opset)

    reduce = parts.subgraph([*kept, *parts.given], inputs[1:3])
    key, value = reduce.outputs
    reduce.outputs.clear()
    _summarize(reduce, key, value)

    merge = ir.Graph([], [], nodes=[], opset_imports={"": parts.opset}, name="main")
    key, value = (given(merge, name, FLOAT, ANY_TOKENS) for name in ("key", "value"))
    _summarize(merge, key, value)

    apply = parts.subgraph([*kept, *parts.given], [name for name in after if name not in kept])
    attention = next(n for n in apply if n.outputs[0].name == node.outputs[0].name)
    by_position = node.op_type.endswith("AftLocal") and bias is not None and bias.shape[0] > 1
    _attend_to_others(apply, attention, window.left, by_position)
    return Stage(
        parts.model(reduce, function),
        parts.model(merge, function),
        parts.model(apply),
        window,
        causal,
        tuple(name for name in after if name in kept and name != parts.main),
    )


def _summarize(graph: ir.Graph, key: ir.Value, value: ir.Value) -> None:
    """Add the outputs ``few_keys`` and ``few_values`` of keys and values."""
    new = NewNodes(graph, "chunk")
    wide = [new.add("Cast", operand, to=FLOAT) for operand in (key, value)]
    node = ir.node("Summary", wide, domain=SUMMARY_DOMAIN, num_outputs=2)
    for output, name in zip(new.append(node), ("few_keys", "few_values"), strict=True):
        output.name, output.dtype, output.shape = name, FLOAT, ir.Shape(ANY_TOKENS)
        graph.outputs.append(output)
    graph.extend(new.nodes)


def _attend_to_others(graph: ir.Graph, node: ir.Node, left: int, by_position: bool) -> None:
    """Replace an attention by one in float32 over summaries, ``left`` filler tokens, and the chunk.

    The filler has no weight. It keeps the summaries, which have no position, out of the window
    of the first token.

    Args:
        graph: the graph, which gets the inputs ``other_keys`` and ``other_values``.
        node: the attention.
        left: the number of filler tokens.
        by_position: whether its first bias has a row for each position of the document.
    """
    keys, values = (given(graph, f"other_{name}", FLOAT, ANY_TOKENS) for name in ("keys", "values"))
    query, key, value, *biases, _ = node.inputs
    new = NewNodes(graph, "chunk")
    own = [new.add("Cast", operand, to=FLOAT) for operand in (query, key, value)]
    zero, masked = (new.constant(np.asarray(x, np.float32)) for x in (0, MASKED))
    sequences = [
        _behind(new, summaries, filler, operand, left)
        for summaries, filler, operand in zip(
            (values, keys, values), (zero, masked, zero), own, strict=True
        )
    ]
    length = new.add("Shape", sequences[1], start=1, end=2)
    tokens = new.add("Shape", own[0], start=1, end=2)
    start = new.add("Sub", length, tokens)
    wide = [new.add("Cast", bias, to=FLOAT) for bias in biases]
    if by_position:
        position = first_position(graph)
        wide[0] = _rows_of_positions(new, wide[0], position, tokens, (start, zero))
    attention = ir.Node(
        node.domain, node.op_type, [*sequences, *wide, length], node.attributes.values()
    )
    attended = new.append(attention)[0]
    rows = new.add("Slice", attended, start, length, new.constant([1]))
    new.replace(node, new.add("CastLike", rows, query))


def _behind(
    new: NewNodes, summaries: ir.Value, filler: ir.Value, own: ir.Value, left: int
) -> ir.Value:
    """Return the rows of summaries, ``left`` filler tokens, and the chunk's own rows."""
    if not left:
        return new.add("Concat", summaries, own, axis=1)
    width = new.add("Shape", own, start=2, end=3)
    shape = new.add("Concat", new.constant([1, left]), width, axis=0)
    return new.add("Concat", summaries, new.add("Expand", filler, shape), own, axis=1)


def _rows_of_positions(
    new: NewNodes,
    rows: ir.Value,
    position: ir.Value,
    tokens: ir.Value,
    others: tuple[ir.Value, ir.Value],
) -> ir.Value:
    """Return the rows ``[T, W]`` of the chunk's positions, behind equal rows for other tokens.

    Args:
        new: the place of the nodes.
        rows: the rows of all positions.
        position: the position of the first token.
        tokens: the number of the chunk's tokens.
        others: the number of the other tokens, and the number in their rows.
    """
    count, number = others
    end = new.add("Add", position, tokens)
    own = new.add("Slice", rows, position, end, new.constant([0]))
    width = new.add("Shape", rows, start=1, end=2)
    before = new.add("Expand", number, new.add("Concat", count, width, axis=0))
    return new.add("Concat", before, own, axis=0)


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

    apply: ir.Model
    advance: ir.Model | None
    keeps: tuple[str, ...]
    recurrence: Recurrence

    @property
    def graphs(self) -> dict[str, ir.Model]:
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
    parts: GraphParts, node: ir.Node, kept: list[str], after: list[str]
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
    node: ir.Node,
    kept: list[str],
    after: list[str],
    recurrence: Recurrence,
) -> ir.Model:
    graph = parts.subgraph([*kept, *parts.given], [name for name in after if name not in kept])
    own = next(n for n in graph if n.outputs[0].name == node.outputs[0].name)
    new = NewNodes(graph, "chunk")
    names = {
        "forward": (LEFT_STATE,),
        "reverse": (RIGHT_STATE,),
        "bidirectional": (LEFT_STATE, RIGHT_STATE),
    }[recurrence.direction]
    states = [_state(graph, name, recurrence) for name in names]
    past = states[0] if len(states) == 1 else new.add("Concat", *states, axis=1)
    result, present = _with_state(graph, new, own, list(own.inputs), past)
    if len(states) > 1:
        halves = new.constant([recurrence.shape[0]] * 2)
        split = ir.node("Split", [present, halves], {"axis": 1}, num_outputs=2)
        present, _ = new.append(split)
    new.replace(own, new.add("CastLike", result, own.inputs[0]))
    if recurrence.direction != "reverse":
        _add_next_state(graph, present, recurrence)
    return parts.model(graph)


def _advance(parts: GraphParts, node: ir.Node, kept: list[str], recurrence: Recurrence) -> ir.Model:
    """Return the graph of the states in reverse, whose queries are the keys: any would do."""
    names = names_of(node.inputs)
    names[0] = names[1]
    sources = dict.fromkeys(name for name in names[:_LENGTHS] if name)
    graph = parts.subgraph([*kept, *parts.given], list(sources))
    found = {str(value.name): value for value in graph.outputs}
    graph.outputs.clear()
    reverse = ir.Node(node.domain, node.op_type, [], node.attributes.values())
    reverse.attributes.add(ir.AttrString("direction", "reverse"))
    heads = node.attributes["kv_num_heads"].as_int()
    reverse.attributes.add(ir.AttrInt64("q_num_heads", heads))
    new = NewNodes(graph, "chunk")
    inputs = [found.get(name) for name in names]
    past = _state(graph, RIGHT_STATE, recurrence)
    _, present = _with_state(graph, new, reverse, inputs, past)
    graph.extend(new.nodes)
    _add_next_state(graph, present, recurrence)
    return parts.model(graph)


def _with_state(
    graph: ir.Graph,
    new: NewNodes,
    node: ir.Node,
    inputs: list[ir.Value | None],
    past: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """Add an operator with inputs in float32, all tokens and a state; return both results."""
    wide = [v if v is None else new.add("Cast", v, to=FLOAT) for v in inputs[:_LENGTHS]]
    wide[RECURRENT_OPERATORS[node.op_type].inputs.index("past_state")] = past
    attributes = node.attributes.values()
    copied = ir.Node(
        node.domain, node.op_type, [*wide, number_of_tokens(graph)], attributes, num_outputs=2
    )
    result, present = new.append(copied)
    return result, present


def _state(graph: ir.Graph, name: str, recurrence: Recurrence) -> ir.Value:
    return given(graph, name, FLOAT, (1, *recurrence.shape))


def _add_next_state(graph: ir.Graph, state: ir.Value, recurrence: Recurrence) -> None:
    state.name, state.dtype = NEXT_STATE, FLOAT
    state.shape = ir.Shape((1, *recurrence.shape))
    graph.outputs.append(state)


def _of_linear_attention(parts: GraphParts, node: ir.Node) -> Recurrence:
    settings = RECURRENT_OPERATORS[node.op_type].attributes_of(ir.to_proto(node))
    heads = int(settings["kv_num_heads"])
    widths = [parts.dims[name][-1] for name in names_of(node.inputs)[1:3]]
    if not all(isinstance(width, int) for width in widths):
        raise NotChunkable(f"{node.op_type} ({node.outputs[0].name}) has keys of unknown width")
    key, value = (int(width) // heads for width in widths)
    normalizer = settings["normalizer"] == "sum"
    shape = (heads, key, value + normalizer)
    return Recurrence.model_validate({"direction": settings["direction"], "shape": shape})


def _of_convolution(parts: GraphParts, node: ir.Node) -> Recurrence:
    weight = parts.constants.get(names_of(node.inputs)[1])
    if weight is None:
        raise NotChunkable(f"the weight of {node.op_type} ({node.outputs[0].name}) is computed")
    channels, taps = weight.shape
    return Recurrence(direction="forward", shape=(taps - 1, channels))


_READERS: Mapping[str, Callable[[GraphParts, ir.Node], Recurrence]] = {
    "RecurrentLinearAttention": _of_linear_attention,
    "CausalDepthwiseConv": _of_convolution,
}
