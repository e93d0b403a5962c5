"""Split of a graph into those of each attention and of the outputs, to run chunk by chunk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from aftexport.bundle.chunked_plan import Pooling
from aftexport.chunked.attention_stage import Stage, make_stage
from aftexport.chunked.graph_parts import ANY_TOKENS, FLOAT, GraphParts, given
from aftexport.chunked.recurrence_stage import RecurrenceStage, make_recurrence_stage
from aftexport.chunked.token_flow import is_recurrence
from aftexport.chunked.token_kinds import OF_TOKENS, Kind, NotChunkable
from aftexport.lowering.evidence import DIRECTION, add_products
from aftexport.lowering.graph_values import names_of
from aftexport.lowering.token_reductions import pooling
from aftexport.operators.domain import DOMAIN


@dataclass(frozen=True)
class Partition:
    """A model in parts.

    Attributes:
        stages: the stages in their order.
        pool: the graph from the values kept after the last stage to the inputs of ``head``; None if
            no output needs pooled values.
        pooled: each output of ``pool``, with the combination of those of chunks: sum, max or first.
        head: the graph from pooled values to the outputs per document, to the pooled values that
            ``tokens`` needs and, with ``explain``, to the directions of the logits that its
            constant ``EXPLAINED`` chooses; None without ``pool``.
        documents: the names of the outputs per document.
        tokens: the graph from the values kept after the last stage, and outputs of ``head``, to the
            outputs per token; None if there are none.
        widths: each output per token, with its width.
        tokens_use_last_stage: whether ``tokens`` has results of the last stage among its inputs.
        explain: the graph from the values kept after the last stage, and the directions, to the
            evidence of each token, see ``aftexport.lowering.evidence``; None if the tokens are not
            summed.
    """

    stages: tuple[Stage | RecurrenceStage, ...]
    pool: ir.Model | None
    pooled: dict[str, Pooling]
    head: ir.Model | None
    documents: tuple[str, ...]
    tokens: ir.Model | None
    widths: dict[str, int]
    tokens_use_last_stage: bool
    explain: ir.Model | None


def partition(model: ir.Model, summed: str | None = None) -> Partition:
    """Split a graph of bare operators.

    Args:
        model: the result of ``rewrite_as_means``, which changes.
        summed: the summed tokens of its output ``evidence.DIRECTION``; None without this output.

    Raises:
        NotChunkable: if the graph cannot run in chunks; gives the reason.
    """
    return _Cutter(model).cut(summed)


class _Cutter(GraphParts):
    def cut(self, summed: str | None) -> Partition:
        attentions = [i for i, node in enumerate(self.nodes) if node.domain == DOMAIN]
        kept = [self.main]
        stages: list[Stage | RecurrenceStage] = []
        for place, index in enumerate(attentions):
            node = self.nodes[index]
            end = attentions[place + 1] if place + 1 < len(attentions) else len(self.nodes)
            after = self._narrowest([*kept, str(node.outputs[0].name)], index, end)
            make = make_recurrence_stage if is_recurrence(node) else make_stage
            stages.append(make(self, node, kept, after))
            kept = after
        pooled = self._pooled()
        back = self._brought_back()
        documents = [name for name in self.outputs if self.kinds[name] is Kind.POOLED]
        pool = head = tokens = None
        if documents or back:
            pool = self.model(self.subgraph([*kept, *self.given], list(pooled)))
            results = list(dict.fromkeys([*documents, *back]))
            head = self.model(self.subgraph([*pooled, *self.given], results))
        widths = self._widths()
        if widths:
            tokens = self.model(self.subgraph([*kept, *self.given, *back], list(widths)))
        return Partition(
            stages=tuple(stages),
            pool=pool,
            pooled=pooled if pool is not None else {},
            head=head,
            documents=tuple(name for name in documents if name != DIRECTION),
            tokens=tokens,
            widths=widths,
            tokens_use_last_stage=tokens is not None and _uses_last_stage(tokens, stages),
            explain=self._explain(kept, summed) if summed is not None else None,
        )

    def _pooled(self) -> dict[str, Pooling]:
        """Return the values pooled from the tokens, with the combination of those of chunks."""
        return {
            str(node.outputs[0].name): combination
            for node in self.nodes
            if self._kind(node) is Kind.POOLED
            and any(self.kinds[name] is Kind.TOKENS for name in names_of(node.inputs))
            and (combination := pooling(node, self.constants)) is not None
        }

    def _kind(self, node: ir.Node) -> Kind:
        return self.kinds[str(node.outputs[0].name)]

    def _brought_back(self) -> list[str]:
        """Return the pooled values that are combined with tokens."""
        return [
            name
            for node in self.nodes
            if self._kind(node) is Kind.COMBINED
            for name in names_of(node.inputs)
            if self.kinds[name] is Kind.POOLED
        ]

    def _widths(self) -> dict[str, int]:
        """Return each output per token with its width."""
        widths = {}
        for name in self.outputs:
            if self.kinds[name] not in OF_TOKENS:
                continue
            width = self.dims[name][-1]
            if self.dims[name][:2] != self.dims[self.main][:2] or not isinstance(width, int):
                shape = ", ".join(map(str, self.dims[name]))
                raise NotChunkable(f"{name} has the shape [{shape}], not [batch, tokens, width]")
            widths[name] = width
        return widths

    def _explain(self, kept: Sequence[str], summed: str) -> ir.Model:
        graph = self.subgraph([*kept, *self.given], [summed])
        tokens = graph.outputs.pop()
        direction = given(graph, DIRECTION, FLOAT, ANY_TOKENS)
        add_products(graph, tokens, direction).shape = ir.Shape([1, None])
        return self.model(graph)

    def _narrowest(self, kept: Sequence[str], start: int, end: int) -> list[str]:
        """Return one value before ``end`` that suffices for all later nodes; else from ``kept``."""
        if len(kept) == 1:
            return list(kept)
        enough = [
            name
            for node in reversed(self.nodes[start + 1 : end])
            for name in names_of(node.outputs)
            if self.kinds[name] is Kind.TOKENS and not self._is_needed(kept, name, end)
        ]
        if enough:
            return [min(enough, key=self._width)]
        return [name for name in kept if self._is_needed([name], "", end)]

    def _width(self, name: str) -> float:
        width = self.dims.get(name, [""])[-1]
        return width if isinstance(width, int) else np.inf

    def _is_needed(self, sources: Iterable[str], without: str, end: int) -> bool:
        """Return whether nodes from ``end`` on, pooled values or outputs depend on ``sources``.

        Dependences through the value ``without`` do not count.
        """
        made = set(sources) - {without}
        for index, node in enumerate(self.nodes):
            if node.op_type == "Shape" or not made.intersection(names_of(node.inputs)):
                continue
            new = set(names_of(node.outputs)) - {without}
            is_late = self._kind(node) in (Kind.POOLED, Kind.COMBINED)
            if index >= end or is_late or new.intersection(self.outputs):
                return True
            made.update(new)
        return not made.isdisjoint(self.outputs)


def _uses_last_stage(tokens: ir.Model, stages: Sequence[Stage | RecurrenceStage]) -> bool:
    results = {name for stage in stages[-1:] for name in names_of(stage.apply.graph.outputs)}
    return not results.isdisjoint(names_of(tokens.graph.inputs))
