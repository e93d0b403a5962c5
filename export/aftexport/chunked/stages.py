"""The graphs of one attention, of one recurrence or of one causal convolution, in chunks.

A recurrence has a state: the summary of all tokens on one side of a chunk. A forward recurrence
needs the state of the tokens on the left, a reverse one that on the right, and a bidirectional one
both. The state of a convolution is its last inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from aftexport.bundle.manifest import ChunkedStage, Recurrence
from aftexport.chunked.document import FIRST_POSITION, LEFT_STATE, MARK, NEXT_STATE, RIGHT_STATE
from aftexport.chunked.summaries import DOMAIN as SUMMARY_DOMAIN
from aftexport.chunked.summaries import Window, summary, window_of
from aftexport.chunked.token_flow import Kind, NotChunkable, classify, is_position_embedding
from aftexport.lowering.graph_values import constants_of, dims_of, main_input_of, names_of
from aftexport.lowering.nodes import NewNodes, remove
from aftexport.operators.domain import DOMAIN, MASKED
from aftexport.operators.mechanisms import RECURRENT_OPERATORS
from aftexport.system.contract import LENGTHS

FLOAT = ir.DataType.FLOAT
ANY_TOKENS = (1, None, None)
"""The axes ``[1, T, C]``."""


class GraphParts:
    """A graph, changed by ``rewrite_as_means``, with the kind of each value; parts become models.

    Raises:
        NotChunkable: if the graph cannot run in chunks; gives the reason.
    """

    def __init__(self, model: ir.Model) -> None:
        self._ir_version = model.ir_version
        self._graph = graph = model.graph
        self.outputs = names_of(graph.outputs)
        self.kinds = classify(graph)
        self.constants = constants_of(graph)
        self.dims = dims_of(graph)
        self.opset_imports = {
            domain: version
            for domain, version in graph.opset_imports.items()
            if domain in ("", DOMAIN)
        }
        self.opset = self.opset_imports.get("", 0)
        self.main = str(main_input_of(graph).name)
        self._count_by_lengths()
        self._shift_position_embeddings()
        self._shift_angles()
        self._add_mark()
        self.given = names_of(graph.inputs)
        self.nodes = list(graph)
        values = (v for node in self.nodes for v in node.outputs)
        self._values = {str(v.name): v for v in (*graph.inputs, *values)}

    def _count_by_lengths(self) -> None:
        """Read the number of tokens from ``lengths``: a shape would need the tokens themselves."""
        # A chunk has one document. OpenVINO needs the size: a Squeeze without axes depends on it.
        lengths = number_of_tokens(self._graph)
        lengths.shape = ir.Shape([1])
        for node in tuple(self._graph):
            if node.op_type == "Shape" and self.kinds[str(node.outputs[0].name)] is Kind.LENGTH:
                node.outputs[0].replace_all_uses_with(lengths)
                remove([node])

    def _shift_position_embeddings(self) -> None:
        """Read embeddings of positions from the position of the chunk's first token on."""
        for node in tuple(self._graph):
            if self.kinds[
                str(node.outputs[0].name)
            ] is Kind.POSITION_EMBEDDING and is_position_embedding(
                node, self.kinds, self.constants
            ):
                new = NewNodes(self._graph, "chunk")
                place = 1 if node.op_type == "Gather" else 2
                positions = node.inputs[place]
                like = new.add("CastLike", first_position(self._graph), positions)
                node.replace_input_with(place, new.add("Add", positions, like))
                if node.op_type == "Slice":
                    node.replace_input_with(1, like)
                self._graph.insert_before(node, new.nodes)
                for added in new.nodes:
                    self.kinds[str(added.outputs[0].name)] = Kind.POSITIONS
        self.kinds[FIRST_POSITION] = Kind.POSITIONS

    def _shift_angles(self) -> None:
        """Compute angles and marks from the position of the chunk's first token on."""
        for node in tuple(self._graph):
            if self.kinds[str(node.outputs[0].name)] not in (Kind.ANGLES, Kind.MARKS):
                continue
            for place, positions in enumerate(node.inputs):
                if positions is None or self.kinds[str(positions.name)] is not Kind.POSITIONS:
                    continue
                new = NewNodes(self._graph, "chunk")
                like = new.add("CastLike", first_position(self._graph), positions)
                node.replace_input_with(place, new.add("Add", positions, like))
                self._graph.insert_before(node, new.nodes)
                for added in new.nodes:
                    self.kinds[str(added.outputs[0].name)] = Kind.POSITIONS

    def _add_mark(self) -> None:
        """Compute the largest mark of a chunk, by which the tokens of chunks are compared."""
        places = [
            node
            for node in self._graph
            if node.op_type == "ArgMax" and self.kinds[str(node.outputs[0].name)] is Kind.PLACE
        ]
        if len({node.inputs[0] for node in places}) > 1:
            raise NotChunkable(f"it chooses tokens in {len(places)} ways")
        for place in places[:1]:
            new = NewNodes(self._graph, "chunk")
            (marks,) = place.inputs
            assert marks is not None  # ArgMax needs it
            axes = new.constant([1])
            mark = new.add("ReduceMax", marks, axes)
            mark.name, mark.type, mark.shape = MARK, marks.type, ir.Shape([1, 1])
            self._graph.insert_before(place, new.nodes)
            self.kinds |= {str(axes.name): Kind.CONSTANT, MARK: Kind.PLACE}

    def subgraph(self, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Graph:
        """Return the graph that computes ``outputs``, with the needed ones of ``inputs``."""
        needed, nodes = set(outputs), []
        for node in reversed(self.nodes):
            if any(name in needed and name not in inputs for name in names_of(node.outputs)):
                nodes.append(node)
                needed.update(names_of(node.inputs))
        used_inputs = [name for name in dict.fromkeys(inputs) if name in needed]
        ends = {name: self._described(name) for name in (*used_inputs, *outputs)}
        part = ir.GraphView(
            [ends[name] for name in used_inputs],
            [ends[name] for name in outputs],
            nodes=nodes[::-1],
            initializers=[v for name, v in self._graph.initializers.items() if name in needed],
            opset_imports=self.opset_imports,
            name="main",
        )
        return part.clone()

    def _described(self, name: str) -> ir.Value:
        """Return a value, with a type and axes if ``rewrite_as_means`` added it without."""
        value = self._values[name]
        if value.dtype is None:
            value.dtype, value.shape = self._element(value), ir.Shape(ANY_TOKENS)
        return value

    def _element(self, value: ir.Value) -> ir.DataType:
        """Return the type of a value, or that of its input if ``rewrite_as_means`` added it."""
        if value.dtype is not None:
            return value.dtype
        node = value.producer()
        assert node is not None  # inputs have types
        operands = [v for v in node.inputs if v is not None]
        return self._element(next(v for v in operands if self.kinds[str(v.name)] is Kind.TOKENS))

    def model(self, graph: ir.Graph, function: onnx.FunctionProto | None = None) -> ir.Model:
        """Return a graph as a model, with a function of ``summaries`` if it has one."""
        model = ir.Model(graph, ir_version=self._ir_version)
        if function is not None:
            add_function(model, function)
        return model


def add_function(model: ir.Model, function: onnx.FunctionProto) -> None:
    """Add a function of ``summaries`` to a model."""
    summary = ir.serde.deserialize_function(function)
    model.functions[summary.identifier()] = summary
    model.graph.opset_imports[SUMMARY_DOMAIN] = 1


def number_of_tokens(graph: ir.Graph) -> ir.Value:
    """Return the input with the number of a chunk's tokens, which the graph gets if it lacks it."""
    return given(graph, LENGTHS, ir.DataType.INT64, (1,))


def first_position(graph: ir.Graph) -> ir.Value:
    """Return the input with the position of a chunk's first token, likewise."""
    return given(graph, FIRST_POSITION, ir.DataType.INT64, (1,))


def given(graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int | None]) -> ir.Value:
    """Return the input of a graph with a name, which the graph gets if it lacks it."""
    found = next((value for value in graph.inputs if value.name == name), None)
    if found is None:
        found = ir.val(name, dtype, ir.Shape(shape))
        graph.inputs.append(found)
    return found


@dataclass(frozen=True)
class Stage:
    """The graphs of one attention."""

    reduce: ir.Model  # from kept values to ``few_keys`` and ``few_values`` of a chunk
    merge: ir.Model  # from ``key`` and ``value`` of several summaries to those of one
    # from kept values, ``other_keys``, ``other_values`` and, for biases by position, FIRST_POSITION
    # to the next kept values
    apply: ir.Model
    window: Window  # the tokens around a chunk in the inputs of ``apply``
    causal: bool  # whether a token attends only to itself and earlier tokens
    keeps: tuple[str, ...]  # the names of values kept from before the attention for after it

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
    """Return the graphs of an attention between the values ``kept`` before and ``after`` it.

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
    """Replace an attention by one over summaries, ``left`` filler tokens and the chunk."""
    # It is computed in float32. The filler has no weight. It keeps the summaries, which have no
    # position, out of the window of the first token. by_position: the first bias has a row for each
    # position of the document.
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
    """Return the rows ``[T, W]`` of the chunk's positions, behind equal rows for other tokens."""
    # others: the number of the other tokens, and the number in their rows.
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
    """The graphs of one recurrence or convolution."""

    # from kept values and states to the next kept values and, unless the recurrence is reverse, to
    # the state for the next chunk on the right
    apply: ir.Model
    # from kept values and the state on the right to the state for the next chunk on the left; None
    # if the recurrence is forward
    advance: ir.Model | None
    keeps: tuple[str, ...]  # the names of values kept from before the recurrence for after it
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
    """Return the graphs of a recurrence between the values ``kept`` before and ``after`` it.

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
