"""The graphs of one attention in chunks."""

from dataclasses import dataclass

import numpy as np
import onnx

from aftexport.bundle.chunked_plan import ChunkedStage
from aftexport.chunked.document import FIRST_POSITION
from aftexport.chunked.graph_parts import GraphParts, described
from aftexport.chunked.summaries import DOMAIN as SUMMARY_DOMAIN
from aftexport.chunked.summaries import Window, summary, window_of
from aftexport.operators.constants import MASKED

_FLOAT = onnx.TensorProto.FLOAT


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

    reduce: onnx.ModelProto
    merge: onnx.ModelProto
    apply: onnx.ModelProto
    window: Window
    causal: bool
    keeps: tuple[str, ...]

    @property
    def graphs(self) -> dict[str, onnx.ModelProto]:
        """The graphs by their names in the archive, without the number of the stage."""
        return {"reduce": self.reduce, "merge": self.merge, "apply": self.apply}

    @property
    def plan(self) -> ChunkedStage:
        """The description of the stage in the manifest."""
        window = self.window
        return ChunkedStage(
            left=window.left, right=window.right, causal=self.causal, keeps=self.keeps
        )


def make_stage(parts: GraphParts, node: onnx.NodeProto, kept: list[str], after: list[str]) -> Stage:
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
    bias = parts.constants.get(node.input[3]) if len(node.input) > 4 else None
    window = window_of(node, causal, bias)
    function = summary(node, parts.opset)
    key, value = node.input[1:3]

    to_summary = parts.subgraph([*kept, *parts.given], [key, value])
    to_summary.node.extend([_in_float32(key, "key_f"), _in_float32(value, "value_f")])
    to_summary.node.append(_summarize("key_f", "value_f"))
    del to_summary.output[:]
    to_summary.output.extend([described("few_keys", _FLOAT), described("few_values", _FLOAT)])

    merge = onnx.helper.make_graph(
        [_summarize("key", "value")],
        "main",
        [described("key", _FLOAT), described("value", _FLOAT)],
        [described("few_keys", _FLOAT), described("few_values", _FLOAT)],
    )

    new = [name for name in after if name not in kept]
    apply = parts.subgraph([*kept, *parts.given], new)
    place = next(i for i, n in enumerate(apply.node) if n.output[0] == node.output[0])
    before, after_it = apply.node[:place], apply.node[place + 1 :]
    by_position = node.op_type.endswith("AftLocal") and bias is not None and bias.shape[0] > 1
    own = _attend_with_others(node, window.left, by_position)
    del apply.node[:]
    apply.node.extend([*before, *own, *after_it])
    apply.initializer.extend(_constants(window.left))
    apply.input.extend([described("other_keys", _FLOAT), described("other_values", _FLOAT)])
    if by_position and all(value.name != FIRST_POSITION for value in apply.input):
        apply.input.append(parts.first_position)
    return Stage(
        parts.model(to_summary, function),
        parts.model(merge, function),
        parts.model(apply),
        window,
        causal,
        tuple(name for name in after if name in kept and name != parts.main),
    )


def _attend_with_others(node: onnx.NodeProto, left: int, by_position: bool) -> list[onnx.NodeProto]:
    """Return the attention in float32 over summaries, ``left`` filler tokens, and the chunk.

    The filler has no weight. It keeps the summaries, which have no position, out of the window
    of the first token.

    Args:
        node: the attention.
        left: the number of filler tokens.
        by_position: whether its first bias has a row for each position of the document.
    """
    query, key, value, *biases, _ = node.input
    result = node.output[0]
    make = onnx.helper.make_node
    before = {"query": "other_values", "key": "other_keys", "value": "other_values"}
    nodes = []
    for (name, summaries), operand in zip(before.items(), (query, key, value), strict=True):
        nodes += _behind(summaries, operand, name, left)
    nodes += [
        make("Shape", ["chunk_key"], ["chunk_length"], start=1, end=2),
        make("Shape", ["chunk_query_own"], ["chunk_tokens"], start=1, end=2),
        make("Sub", ["chunk_length", "chunk_tokens"], ["chunk_start"]),
    ]
    for place, bias in enumerate(biases):
        nodes.append(_in_float32(bias, f"chunk_bias_{place}"))
    if by_position:
        nodes[-1].output[0] = "chunk_rows"
        nodes += _rows_of_positions("chunk_rows", "chunk_bias_0")
    attended = onnx.NodeProto()
    attended.CopyFrom(node)
    del attended.input[:], attended.output[:]
    attended.input.extend(["chunk_query", "chunk_key", "chunk_value"])
    attended.input.extend(f"chunk_bias_{place}" for place in range(len(biases)))
    attended.input.append("chunk_length")
    attended.output.append("chunk_attended")
    nodes += [
        attended,
        make(
            "Slice",
            ["chunk_attended", "chunk_start", "chunk_length", "chunk_axis"],
            ["chunk_result"],
        ),
        make("CastLike", ["chunk_result", query], [result]),
    ]
    return nodes


def _behind(summaries: str, operand: str, name: str, left: int) -> list[onnx.NodeProto]:
    """Return ``chunk_{name}``: the rows of summaries, ``left`` filler tokens, and an operand."""
    make = onnx.helper.make_node
    filler, own = f"chunk_nothing_{name}", f"chunk_{name}_own"
    if not left:
        join = make("Concat", [summaries, own], [f"chunk_{name}"], axis=1)
        return [_in_float32(operand, own), join]
    number = "chunk_masked" if name == "key" else "chunk_zero"
    return [
        _in_float32(operand, own),
        make("Shape", [own], [f"{filler}_width"], start=2, end=3),
        make("Concat", ["chunk_gap", f"{filler}_width"], [f"{filler}_shape"], axis=0),
        make("Expand", [number, f"{filler}_shape"], [filler]),
        make("Concat", [summaries, filler, own], [f"chunk_{name}"], axis=1),
    ]


def _rows_of_positions(rows: str, result: str) -> list[onnx.NodeProto]:
    """Return the rows ``[T, W]`` of the chunk's positions, and zeros for the rows before them."""
    make = onnx.helper.make_node
    return [
        make("Add", [FIRST_POSITION, "chunk_tokens"], ["chunk_end_position"]),
        make(
            "Slice",
            [rows, FIRST_POSITION, "chunk_end_position", "chunk_first_axis"],
            ["chunk_own_rows"],
        ),
        make("Shape", [rows], ["chunk_width"], start=1, end=2),
        make("Concat", ["chunk_start", "chunk_width"], ["chunk_zeros_shape"], axis=0),
        make("Expand", ["chunk_zero", "chunk_zeros_shape"], ["chunk_zero_rows"]),
        make("Concat", ["chunk_zero_rows", "chunk_own_rows"], [result], axis=0),
    ]


def _in_float32(name: str, result: str) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [name], [result], to=_FLOAT)


def _summarize(key: str, value: str) -> onnx.NodeProto:
    return onnx.helper.make_node(
        "Summary", [key, value], ["few_keys", "few_values"], domain=SUMMARY_DOMAIN
    )


def _constants(left: int) -> list[onnx.TensorProto]:
    named = {
        "chunk_gap": np.array([1, left]),
        "chunk_masked": np.float32(MASKED),
        "chunk_zero": np.float32(0),
        "chunk_axis": np.array([1]),
        "chunk_first_axis": np.array([0]),
    }
    return [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in named.items()]
