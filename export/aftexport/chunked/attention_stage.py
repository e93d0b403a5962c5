"""The graphs of one attention in chunks."""

from dataclasses import dataclass

import numpy as np
import onnx

from aftexport.bundle.manifest import ChunkedStage
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
        apply: the graph from kept values, ``other_keys`` and ``other_values`` to the next kept
            values.
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
    del apply.node[:]
    apply.node.extend([*before, *_attend_with_others(node, window.left), *after_it])
    apply.initializer.extend(_constants(window.left))
    apply.input.extend([described("other_keys", _FLOAT), described("other_values", _FLOAT)])
    return Stage(
        parts.model(to_summary, function),
        parts.model(merge, function),
        parts.model(apply),
        window,
        causal,
        tuple(name for name in after if name in kept and name != parts.main),
    )


def _attend_with_others(node: onnx.NodeProto, left: int) -> list[onnx.NodeProto]:
    """Return the attention in float32 over summaries, ``left`` filler tokens, and the chunk.

    The filler has no weight. It keeps the summaries, which have no position, out of the window
    of the first token.
    """
    query, key, value, *biases, _ = node.input
    result = node.output[0]
    make = onnx.helper.make_node
    nodes = []
    before = {"query": "other_values", "key": "other_keys", "value": "other_values"}
    for name, operand in zip(before, (query, key, value), strict=True):
        filler = f"chunk_nothing_{name}"
        own = f"chunk_{name}_own"
        nodes.append(_in_float32(operand, own))
        operands = [before[name], own]
        if left:
            nodes += [
                make("Shape", [own], [f"{filler}_width"], start=2, end=3),
                make("Concat", ["chunk_gap", f"{filler}_width"], [f"{filler}_shape"], axis=0),
                make(
                    "Expand",
                    ["chunk_masked" if name == "key" else "chunk_zero", f"{filler}_shape"],
                    [filler],
                ),
            ]
            operands.insert(1, filler)
        nodes.append(make("Concat", operands, [f"chunk_{name}"], axis=1))
    for place, bias in enumerate(biases):
        nodes.append(_in_float32(bias, f"chunk_bias_{place}"))
    attended = onnx.NodeProto()
    attended.CopyFrom(node)
    del attended.input[:], attended.output[:]
    attended.input.extend(["chunk_query", "chunk_key", "chunk_value"])
    attended.input.extend(f"chunk_bias_{place}" for place in range(len(biases)))
    attended.input.append("chunk_length")
    attended.output.append("chunk_attended")
    nodes += [
        make("Shape", ["chunk_key"], ["chunk_length"], start=1, end=2),
        attended,
        make("Shape", ["chunk_query_own"], ["chunk_tokens"], start=1, end=2),
        make("Sub", ["chunk_length", "chunk_tokens"], ["chunk_start"]),
        make(
            "Slice",
            ["chunk_attended", "chunk_start", "chunk_length", "chunk_axis"],
            ["chunk_result"],
        ),
        make("CastLike", ["chunk_result", query], [result]),
    ]
    return nodes


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
    }
    return [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in named.items()]
