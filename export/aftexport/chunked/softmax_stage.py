"""The graphs of one softmax attention, in chunks; its keys and values are kept as they are.

``project`` computes the query, key and value of each token of a chunk. ``attend`` attends from a
chunk to a block of keys, see ``stage_runs.merged``. ``apply`` computes the values after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from aftexport.bundle.manifest import ChunkedStage, KeptKeys
from aftexport.chunked.document import ATTENDED, KEY, LOG_SUM, QUERY, QUERY_START, VALUE
from aftexport.chunked.stages import ANY_TOKENS, FLOAT, GraphParts, first_position, given
from aftexport.chunked.token_flow import Kind, NotChunkable, inputs_of_softmax
from aftexport.lowering.graph_values import names_of
from aftexport.lowering.nodes import NewNodes, take_place


@dataclass(frozen=True)
class SoftmaxStage:
    """The graphs of one softmax attention."""

    project: ir.Model  # from kept values to QUERY, KEY and VALUE, rotated by the positions
    # from QUERY, KEY and VALUE, of which the key may be of other tokens, and QUERY_START to
    # ATTENDED and LOG_SUM
    attend: ir.Model
    apply: ir.Model  # from kept values, ATTENDED and, with a sink, LOG_SUM to the next kept values
    keeps: tuple[str, ...]  # the names of values kept from before the attention for after it
    keys: KeptKeys

    @property
    def graphs(self) -> dict[str, ir.Model]:
        """The graphs by their names in the archive, without the number of the stage."""
        return {"project": self.project, "attend": self.attend, "apply": self.apply}

    @property
    def plan(self) -> ChunkedStage:
        """The description of the stage in the manifest."""
        return ChunkedStage(
            left=0,
            right=0,
            causal=self.keys.window_right == 0,
            keeps=self.keeps,
            recurrence=None,
            keys=self.keys,
        )


def make_softmax_stage(
    parts: GraphParts, node: ir.Node, kept: list[str], after: list[str]
) -> SoftmaxStage:
    """Return the graphs of a softmax attention between the values ``kept`` before and ``after`` it.

    Raises:
        NotChunkable: if the width of the keys is unknown.
    """
    query, key, value, _ = widths_of_softmax(node)
    left, right = window_of(node)
    return SoftmaxStage(
        _project(parts, node, kept),
        _attend(parts, node, (query, key, value)),
        _apply(parts, node, kept, after),
        tuple(name for name in after if name in kept and name != parts.main),
        KeptKeys(
            window_left=left if left >= 0 else None,
            window_right=right if right >= 0 else None,
            width=key + value,
        ),
    )


def window_of(node: ir.Node) -> tuple[int, int]:
    """Return the numbers of keys that a query sees on both sides; -1 for all."""
    left, right = (node.attributes.get_int(f"window_{side}", -1) for side in ("left", "right"))
    return left, right


def is_window(node: ir.Node) -> bool:
    """Return whether the keys that a query of a softmax attention sees have a maximum number."""
    return min(window_of(node)) >= 0


def widths_of_softmax(node: ir.Node) -> tuple[int, int, int, int]:
    """Return the widths of query, key, value and result of a softmax attention.

    Raises:
        NotChunkable: if one of them is unknown.
    """
    query, key, value = (None if x is None or not x.shape else x.shape[-1] for x in node.inputs[:3])
    if not (isinstance(query, int) and isinstance(key, int) and isinstance(value, int)):
        raise NotChunkable(f"{node.op_type} ({node.outputs[0].name}) has keys of unknown width")
    heads = node.attributes.get_int("num_heads", 1)
    kv_heads = node.attributes.get_int("kv_num_heads", 0) or heads
    return query, key, value, value * heads // kv_heads


def _project(parts: GraphParts, node: ir.Node, kept: Sequence[str]) -> ir.Model:
    names = inputs_of_softmax(node)
    caches = [names[name] for name in ("cos_cache", "sin_cache") if names[name]]
    computed = [name for name in caches if parts.kinds[name] is not Kind.CONSTANT]
    wanted = [*names_of(node.inputs)[:3], *computed]
    graph = parts.subgraph([*kept, *parts.given], wanted)
    new = NewNodes(graph, "chunk")
    wide = [new.add("Cast", value, to=FLOAT) for value in graph.outputs]
    graph.outputs.clear()
    query, key, value, *rows = wide
    if caches:
        rotation = _Rotation(new, rows or _rows(new, graph, [parts.constants[n] for n in caches]))
        heads = node.attributes.get_int("num_heads", 1)
        axis = 4 if node.attributes.get_int("interleaved", 0) else 3
        query = rotation.rotated(query, heads, axis)
        key = rotation.rotated(key, node.attributes.get_int("kv_num_heads", 0) or heads, axis)
    for result, name in ((query, QUERY), (key, KEY), (value, VALUE)):
        _add_output(graph, result, name)
    graph.extend(new.nodes)
    return parts.model(graph)


def _rows(new: NewNodes, graph: ir.Graph, caches: Sequence[np.ndarray]) -> list[ir.Value]:
    """Return the rows of tables ``[P, r / 2]`` for the positions of the chunk."""
    start = first_position(graph)
    tokens = new.add("Shape", new.nodes[0].outputs[0], start=1, end=2)
    end = new.add("Add", start, tokens)
    return [
        new.add("Slice", new.constant(cache.astype(np.float32)), start, end, new.constant([0]))
        for cache in caches
    ]


class _Rotation:
    """Rotary positions (RoFormer, arXiv 2104.09864, eq. 34), from the rows ``[T, r / 2]``."""

    def __init__(self, new: NewNodes, rows: Sequence[ir.Value]) -> None:
        self._new = new
        self._cos, self._sin = rows

    def rotated(self, x: ir.Value, heads: int, axis: int) -> ir.Value:
        """Return ``x [1, T, heads * d]`` with the first r channels of each head rotated.

        The two channels of a pair lie along ``axis`` of ``[1, T, heads, 2, r / 2]``, or of
        ``[1, T, heads, r / 2, 2]``.
        """
        new = self._new
        by_head = new.add("Reshape", x, new.constant([0, 0, heads, -1]))
        half = new.add("Shape", self._cos, start=1, end=2)
        turned = new.add("Add", half, half)
        zero, last, most = (new.constant([n]) for n in (0, 3, np.iinfo(np.int64).max))
        first = new.add("Slice", by_head, zero, turned, last)
        rest = new.add("Slice", by_head, turned, most, last)
        of_pairs = [2, -1] if axis == 3 else [-1, 2]
        pairs = new.add("Reshape", first, new.constant([0, 0, heads, *of_pairs]))
        split = ir.node("Split", [pairs, new.constant([1, 1])], {"axis": axis}, num_outputs=2)
        a, b = new.append(split)
        axes = new.constant([1, axis - 1])
        cos, sin = (new.add("Unsqueeze", rows, axes) for rows in (self._cos, self._sin))
        turned_a = new.add("Sub", new.add("Mul", a, cos), new.add("Mul", b, sin))
        turned_b = new.add("Add", new.add("Mul", b, cos), new.add("Mul", a, sin))
        joined = new.add("Concat", turned_a, turned_b, axis=axis)
        packed = new.add("Reshape", joined, new.constant([0, 0, heads, -1]))
        whole = new.add("Concat", packed, rest, axis=3)
        return new.add("Reshape", whole, new.constant([0, 0, -1]))


def _attend(parts: GraphParts, node: ir.Node, widths: Sequence[int]) -> ir.Model:
    """Return the attention to keys whose positions start at 0, in float32 and without the sink."""
    graph = ir.Graph([], [], nodes=[], opset_imports=parts.opset_imports, name="main")
    operands = [
        given(graph, name, FLOAT, (1, None, width))
        for name, width in zip((QUERY, KEY, VALUE), widths, strict=True)
    ]
    start = given(graph, QUERY_START, ir.DataType.INT64, (1,))
    new = NewNodes(graph, "chunk")
    lengths, key_lengths = (new.add("Shape", x, start=1, end=2) for x in operands[:2])
    bias = inputs_of_softmax(node)["bias"]
    rows = new.constant(parts.constants[bias].astype(np.float32)) if bias else None
    attention = ir.Node(
        node.domain,
        node.op_type,
        [*operands, None, rows, lengths, key_lengths, None, None, start],
        node.attributes.values(),
        num_outputs=2,
    )
    for output, name in zip(new.append(attention), (ATTENDED, LOG_SUM), strict=True):
        _add_output(graph, output, name)
    graph.extend(new.nodes)
    return parts.model(graph)


def _apply(parts: GraphParts, node: ir.Node, kept: Sequence[str], after: Sequence[str]) -> ir.Model:
    name = str(node.outputs[0].name)
    graph = parts.subgraph([*kept, *parts.given, name], [n for n in after if n not in kept])
    old = next(value for value in graph.inputs if value.name == name)
    new = NewNodes(graph, "chunk")
    attended = given(graph, ATTENDED, FLOAT, ANY_TOKENS)
    sink = inputs_of_softmax(node)["sink"]
    if sink:
        attended = _with_sink(graph, new, attended, parts.constants[sink])
    result = new.add("Cast", attended, to=old.dtype or FLOAT)
    take_place(old, result)
    graph.inputs.remove(old)
    first = next(iter(graph), None)
    if first is None:
        graph.extend(new.nodes)
    else:
        graph.insert_before(first, new.nodes)
    return parts.model(graph)


def _with_sink(graph: ir.Graph, new: NewNodes, attended: ir.Value, sink: np.ndarray) -> ir.Value:
    """Return an attention with the weight of its sink, which counts once for all blocks of keys."""
    log_sum = given(graph, LOG_SUM, FLOAT, ANY_TOKENS)
    share = new.add("Sigmoid", new.add("Sub", log_sum, new.constant(sink.astype(np.float32))))
    by_head = new.add("Reshape", attended, new.constant([0, 0, len(sink), -1]))
    weighed = new.add("Mul", by_head, new.add("Unsqueeze", share, new.constant([3])))
    return new.add("Reshape", weighed, new.constant([0, 0, -1]))


def _add_output(graph: ir.Graph, value: ir.Value, name: str) -> None:
    value.name, value.dtype, value.shape = name, FLOAT, ir.Shape(ANY_TOKENS)
    graph.outputs.append(value)
