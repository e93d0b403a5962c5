"""Split of a graph into the graphs that reduce and apply each attention, chunk by chunk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from aftexport.bundle.manifest import Pooling
from aftexport.chunked.summaries import DOMAIN as SUMMARY_DOMAIN
from aftexport.chunked.summaries import Window, summary, window_of
from aftexport.contract import EVIDENCE, LENGTHS, main_input
from aftexport.operators.domain import DOMAIN, opset_of
from aftexport.operators.numerics import MASKED
from aftexport.passes.evidence import DIRECTION, products
from aftexport.passes.token_flow import Kind, classify, constants_of, pooling

FLOAT = onnx.TensorProto.FLOAT


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


@dataclass(frozen=True)
class Partition:
    """A model in parts.

    Attributes:
        stages: the stages in their order.
        pool: the graph from the values kept after the last stage to the inputs of ``head``.
        pooled: each output of ``pool``, with the combination of those of chunks: sum, max or first.
        head: the graph from pooled values to the logits and, with ``explain``, the direction.
        explain: the graph from the values kept after the last stage, and the direction, to the
            evidence of each token, see ``aftexport.passes.evidence``; None if the tokens are not
            summed.
    """

    stages: tuple[Stage, ...]
    pool: onnx.ModelProto
    pooled: dict[str, Pooling]
    head: onnx.ModelProto
    explain: onnx.ModelProto | None


def partition(model: onnx.ModelProto, summed: str | None = None) -> Partition:
    """Split a graph of bare operators.

    Args:
        model: the result of ``rewrite_as_means``.
        summed: the summed tokens of its output ``evidence.DIRECTION``; None without this output.

    Raises:
        NotChunkable: if the graph cannot run in chunks; gives the reason.
    """
    return _Cutter(model).cut(summed)


class _Cutter:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.nodes = list(model.graph.node)
        self.main = main_input([value.name for value in model.graph.input])
        self.kinds = classify(model)
        self.constants = constants_of(model.graph)
        self.opset = opset_of(model)
        graph = model.graph
        self.described = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
        # The number of tokens must not need the tokens of the whole document.
        for node in self.nodes:
            if node.op_type == "Shape" and self.kinds[node.output[0]] is Kind.LENGTH:
                node.op_type, node.input[0] = "Identity", LENGTHS
                del node.attribute[:]
        self.described[LENGTHS] = onnx.helper.make_tensor_value_info(
            LENGTHS, onnx.TensorProto.INT64, ("batch",)
        )

    def cut(self, summed: str | None) -> Partition:
        attentions = [i for i, node in enumerate(self.nodes) if node.domain == DOMAIN]
        kept = [self.main]
        stages = []
        for place, index in enumerate(attentions):
            node = self.nodes[index]
            end = attentions[place + 1] if place + 1 < len(attentions) else len(self.nodes)
            after = self._narrowest([*kept, *node.output], index, end)
            stages.append(self._stage(node, kept, after))
            kept = after
        reductions = {
            node.output[0]: combination
            for node in self.nodes
            if self.kinds[node.output[0]] is Kind.POOLED
            and any(self.kinds[name] is Kind.TOKENS for name in node.input)
            and (combination := pooling(node, self.constants)) is not None
        }
        outputs = [output.name for output in self.model.graph.output]
        pool = self._model(self._subgraph([*kept, self.main, "lengths"], list(reductions)))
        head = self._model(self._subgraph([*reductions, self.main, "lengths"], outputs))
        explain = self._explain(kept, summed) if summed is not None else None
        return Partition(tuple(stages), pool, reductions, head, explain)

    def _explain(self, kept: Sequence[str], summed: str) -> onnx.ModelProto:
        graph = self._subgraph([*kept, self.main, "lengths"], [summed])
        graph.node.extend(products(summed))
        graph.input.append(_value(DIRECTION, FLOAT))
        del graph.output[:]
        graph.output.append(onnx.helper.make_tensor_value_info(EVIDENCE, FLOAT, (1, None)))
        return self._model(graph)

    def _narrowest(self, kept: Sequence[str], start: int, end: int) -> list[str]:
        """Return one value before ``end`` that suffices for all later nodes; else from ``kept``."""
        if len(kept) == 1:
            return list(kept)
        for node in reversed(self.nodes[start + 1 : end]):
            for name in node.output:
                if self.kinds[name] is Kind.TOKENS and not self._is_needed(kept, name, end):
                    return [name]
        return [name for name in kept if self._is_needed([name], "", end)]

    def _is_needed(self, sources: Iterable[str], without: str, end: int) -> bool:
        """Return whether nodes from ``end`` on, or pooled values, depend on ``sources``.

        Dependences through the value ``without`` do not count.
        """
        made = set(sources) - {without}
        for index, node in enumerate(self.nodes):
            if node.op_type == "Shape" or not made.intersection(node.input):
                continue
            if index >= end or self.kinds[node.output[0]] is Kind.POOLED:
                return True
            made.update(set(node.output) - {without})
        return False

    def _stage(self, node: onnx.NodeProto, kept: list[str], after: list[str]) -> Stage:
        causal = node.op_type.startswith("Causal")
        bias = self.constants.get(node.input[3]) if len(node.input) > 4 else None
        window = window_of(node, causal, bias)
        function = summary(node, self.opset)
        key, value = node.input[1:3]

        to_summary = self._subgraph([*kept, self.main, "lengths"], [key, value])
        to_summary.node.extend([_in_float32(key, "key_f"), _in_float32(value, "value_f")])
        to_summary.node.append(_summarize("key_f", "value_f"))
        del to_summary.output[:]
        to_summary.output.extend([_value("few_keys", FLOAT), _value("few_values", FLOAT)])

        merge = onnx.helper.make_graph(
            [_summarize("key", "value")],
            "main",
            [_value("key", FLOAT), _value("value", FLOAT)],
            [_value("few_keys", FLOAT), _value("few_values", FLOAT)],
        )

        new = [name for name in after if name not in kept]
        apply = self._subgraph([*kept, self.main, "lengths"], new)
        place = next(i for i, n in enumerate(apply.node) if n.output[0] == node.output[0])
        before, after_it = apply.node[:place], apply.node[place + 1 :]
        del apply.node[:]
        apply.node.extend([*before, *self._attend_with_others(node, window.left), *after_it])
        apply.initializer.extend(_constants(window.left))
        apply.input.extend([_value("other_keys", FLOAT), _value("other_values", FLOAT)])
        return Stage(
            self._model(to_summary, function),
            self._model(merge, function),
            self._model(apply),
            window,
            causal,
            tuple(name for name in after if name in kept and name != self.main),
        )

    def _attend_with_others(self, node: onnx.NodeProto, left: int) -> list[onnx.NodeProto]:
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
            parts = [before[name], own]
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
                parts.insert(1, filler)
            nodes.append(make("Concat", parts, [f"chunk_{name}"], axis=1))
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

    def _subgraph(self, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.GraphProto:
        """Return the graph that computes ``outputs``, with the needed ones of ``inputs``."""
        needed, nodes = set(outputs), []
        for node in reversed(self.nodes):
            if any(name in needed and name not in inputs for name in node.output):
                nodes.append(node)
                needed.update(node.input)
        used_inputs = [name for name in dict.fromkeys(inputs) if name in needed]
        made = {name for node in nodes for name in node.output}
        return onnx.helper.make_graph(
            nodes[::-1],
            "main",
            [self._description(name) for name in used_inputs],
            [self._description(name) for name in outputs],
            [i for i in self.model.graph.initializer if i.name in needed],
            value_info=[
                v for v in self.model.graph.value_info if v.name in made and v.name not in outputs
            ],
        )

    def _description(self, name: str) -> onnx.ValueInfoProto:
        description: onnx.ValueInfoProto | None = self.described.get(name)
        return description or _value(name, self._element(name))

    def _element(self, name: str) -> int:
        """Return the type of a value, or that of its input if ``rewrite_as_means`` added it."""
        if name in self.described:
            return int(self.described[name].type.tensor_type.elem_type)
        node = next(node for node in self.nodes if name in node.output)
        return self._element(next(n for n in node.input if self.kinds[n] is Kind.TOKENS))

    def _model(
        self, graph: onnx.GraphProto, function: onnx.FunctionProto | None = None
    ) -> onnx.ModelProto:
        imports = [o for o in self.model.opset_import if o.domain in ("", DOMAIN)]
        if function is not None:
            imports.append(onnx.helper.make_opsetid(SUMMARY_DOMAIN, 1))
        return onnx.helper.make_model(
            graph,
            opset_imports=imports,
            functions=[function] if function is not None else [],
            ir_version=self.model.ir_version,
        )


def _value(name: str, element: int) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, element, (1, None, None))


def _in_float32(name: str, result: str) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [name], [result], to=FLOAT)


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
