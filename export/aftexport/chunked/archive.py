"""``chunked.zip``: the graphs of both passes in a bundle, cut out of the model's graph.

Their weights are in ``model.onnx.data``, each once for all graphs and the whole model.
"""

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from aftexport.bundle.manifest import ChunkedPlan, Pooling
from aftexport.chunked.document import MARK
from aftexport.chunked.softmax_stage import (
    SoftmaxStage,
    is_window,
    make_softmax_stage,
    widths_of_softmax,
    window_of,
)
from aftexport.chunked.softmaxes import count_softmax_attention, rewrite_as_means
from aftexport.chunked.stages import (
    ANY_TOKENS,
    FLOAT,
    GraphParts,
    RecurrenceStage,
    Stage,
    given,
    make_recurrence_stage,
    make_stage,
)
from aftexport.chunked.token_flow import (
    OF_TOKENS,
    Kind,
    NotChunkable,
    is_recurrence,
    is_softmax,
    numbers_of_token,
)
from aftexport.engines.onnxruntime.sessions import take_choice
from aftexport.engines.peak_memory import packed_width
from aftexport.lowering.evidence import (
    DIRECTION,
    LARGEST,
    NoEvidence,
    add_direction,
    add_products,
)
from aftexport.lowering.finish import finish
from aftexport.lowering.graph_values import constants_of, names_of, pooling
from aftexport.operators.domain import DOMAIN
from aftexport.system.onnx_files import WeightFile

_OF_CHUNK = (Kind.TOKENS, Kind.PADDED)
"""The kinds of values that are pooled chunk by chunk."""
_AnyStage = Stage | RecurrenceStage | SoftmaxStage
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


_NARROW_KEYS = 1024
"""The maximum width of a narrow window, see ``is_narrow`` of the kernel of SoftmaxAttention."""


@dataclass(frozen=True)
class _Partition:
    """A model in parts; graphs that no output needs are None."""

    stages: tuple[_AnyStage, ...]
    pool: ir.Model | None  # from the values kept after the last stage to the inputs of ``head``
    pooled: dict[str, Pooling]  # each output of ``pool``, with the combination of those of chunks
    # from pooled values to the outputs per document, to the pooled values that ``tokens`` needs
    # and, with ``explain``, to the directions of the logits that its constant EXPLAINED chooses
    head: ir.Model | None
    documents: tuple[str, ...]  # the names of the outputs per document
    # from the values kept after the last stage, and outputs of ``head``, to the outputs per token
    tokens: ir.Model | None
    widths: dict[str, int]  # each output per token, with its width
    rows: dict[str, int]  # products and parts of tables in rows, with their numbers for each token
    tokens_use_last_stage: bool  # whether ``tokens`` has results of the last stage among its inputs
    # from the values kept after the last stage, and the directions, to the evidence of each token,
    # see aftexport.lowering.evidence; None if the tokens are not summed
    explain: ir.Model | None


def write_chunked(
    path: Path,
    model: onnx.ModelProto,
    *,
    precision: str,
    explained: Sequence[str] | None = None,
    weights: WeightFile | None = None,
) -> ChunkedPlan:
    """Split a graph of bare operators, before any fusion, and write its parts; return their plan.

    ``explained`` are the outputs with evidence, by ``evidence.add_evidence``; None to look for
    them. ``weights`` is the file beside the archive; None for a new one.

    Raises:
        NotChunkable: if the model cannot run in chunks; gives the reason.
    """
    means = rewrite_as_means(model)
    try:
        summed = add_direction(means, explained).tokens
    except NoEvidence:  # the chunks return no evidence; the whole graph may still do
        summed = None
    try:
        parts = _partition(means, summed)
    except NotChunkable as reason:
        # The first refused node is often one of rotary positions, which hides the true reason.
        if count_softmax_attention(model):
            raise NotChunkable(
                f"its softmax attention needs the whole document; {reason}"
            ) from reason
        raise
    graphs = _named(parts)
    plan = ChunkedPlan(
        stages=tuple(stage.plan for stage in parts.stages),
        pooled=parts.pooled,
        evidence=parts.explain is not None,
        documents=parts.documents,
        tokens=parts.widths,
        tokens_use_last_stage=parts.tokens_use_last_stage,
        token_bytes=max(
            _token_bytes(graph, parts.widths if name == "tokens" else {}, parts.rows)
            for name, graph in graphs.items()
        ),
        quadratic_tokens=_quadratic_tokens(means.graph, parts.rows),
    )
    del means, parts  # the graphs are released one by one
    finished = ((name, _finished(graphs.pop(name), precision)) for name in tuple(graphs))
    _write(path, finished, weights or WeightFile(path.parent))
    return plan


def _named(parts: _Partition) -> dict[str, ir.Model]:
    named: dict[str, ir.Model] = {}
    for number, stage in enumerate(parts.stages):
        named |= {f"{number}.{name}": graph for name, graph in stage.graphs.items()}
    late = {
        "pool": parts.pool,
        "head": parts.head,
        "tokens": parts.tokens,
        "explain": parts.explain,
    }
    return named | {name: graph for name, graph in late.items() if graph is not None}


def _finished(part: ir.Model, precision: str) -> onnx.ModelProto:
    model = ir.to_proto(part)
    take_choice(model)
    summaries = list(model.functions)
    del model.functions[:]
    finished = finish(model, precision=precision)
    finished.functions.extend(summaries)
    return finished


def _write(path: Path, graphs: Iterable[tuple[str, onnx.ModelProto]], weights: WeightFile) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, model in graphs:
            archive.writestr(zipfile.ZipInfo(f"{name}.onnx", _LONG_AGO), weights.take(model))


_OF_ROWS = ("Gather", "GatherND", "Gemm", "MatMul")


def _token_bytes(model: ir.Model, outputs: Mapping[str, int], rows: Mapping[str, int]) -> int:
    """Return the maximum bytes of one token during the run of a graph: products and copies."""
    weights = constants_of(model.graph)
    widths, tables = [], []
    for node in model.graph:
        inputs = names_of(node.inputs)
        if (result := str(node.outputs[0].name)) in rows:
            widths.append(rows[result])
        elif node.op_type == "MatMul" and inputs[1] in weights:
            widths.append(weights[inputs[1]].shape[-1])
        if node.op_type == "Gather" and inputs[0] in weights and weights[inputs[0]].ndim == 2:
            tables.append(weights[inputs[0]].shape[-1])
        if is_softmax(node):
            widths.append(_attended_width(node))
    return 8 * int(sum((*widths, *tables, *outputs.values())))


def _attended_width(node: ir.Node) -> int:
    """Return the numbers of a token of softmax attention: blocks of keys, two results, workspace.

    The kernel packs all keys of a block, which for a window has up to two chunks. In a narrow
    window, each thread packs those of one head for some queries. The portable body has the products
    of a block of queries with all keys of a block, and none for a window.
    """
    query, key, value, attended = widths_of_softmax(node)
    heads = node.attributes.get_int("num_heads", 1)
    kv_heads = node.attributes.get_int("kv_num_heads", 0) or heads
    packed = packed_width(kv_heads, key, value)
    if not is_window(node):
        workspace = max(packed, 192 * heads)
    else:
        is_narrow = sum(window_of(node)) <= _NARROW_KEYS
        workspace = 2 * packed // (kv_heads if is_narrow else 1)
    return query + 2 * (key + value) + 2 * attended + workspace


def _quadratic_tokens(graph: ir.Graph, rows: Mapping[str, int]) -> int | None:
    """Return the length at which pairs of tokens take as many multiply-adds as the weights."""
    constants = constants_of(graph)
    weights, pairs = 0, 0.0
    for node in graph:
        of_rows = rows.get(str(node.outputs[0].name), 0)
        is_product = node.op_type == "MatMul" or (node.op_type == "Gemm" and of_rows)
        if is_product and (name := names_of(node.inputs)[1]) in constants:
            weights += constants[name].size
        if node.op_type in ("Gather", "GatherND"):  # the weights of the experts of a token
            weights += of_rows
        if is_softmax(node) and not is_window(node):
            query, _, _, attended = widths_of_softmax(node)
            is_causal = node.attributes.get_int("window_right", -1) >= 0
            pairs += (query + attended) / (2 if is_causal else 1)
    return max(1, round(weights / pairs)) if pairs else None


def _partition(model: ir.Model, summed: str | None = None) -> _Partition:
    """Split a graph of bare operators, the result of ``rewrite_as_means``, which changes.

    ``summed`` are the tokens of its output ``evidence.DIRECTION``, if it has one.

    Raises:
        NotChunkable: if the graph cannot run in chunks; gives the reason.
    """
    return _Cutter(model).cut(summed)


class _Cutter(GraphParts):
    def cut(self, summed: str | None) -> _Partition:
        attentions = [i for i, node in enumerate(self.nodes) if node.domain == DOMAIN]
        kept = [self.main]
        stages: list[_AnyStage] = []
        for place, index in enumerate(attentions):
            node = self.nodes[index]
            end = attentions[place + 1] if place + 1 < len(attentions) else len(self.nodes)
            after = self._narrowest([*kept, str(node.outputs[0].name)], index, end)
            stages.append(_maker(node)(self, node, kept, after))
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
        return _Partition(
            stages=tuple(stages),
            pool=pool,
            pooled=pooled if pool is not None else {},
            head=head,
            documents=tuple(name for name in documents if name != DIRECTION),
            tokens=tokens,
            widths=widths,
            rows=self._rows(),
            tokens_use_last_stage=tokens is not None and _uses_last_stage(tokens, stages),
            explain=self._explain([*kept, *back], summed) if summed is not None else None,
        )

    def _pooled(self) -> dict[str, Pooling]:
        """Return the values pooled from the tokens, with the combination of those of chunks."""
        named: dict[str, Pooling] = {MARK: "max", LARGEST: "ties"}
        pooled = {name: how for name, how in named.items() if name in self.kinds}
        for node in self.nodes:
            kinds = {self.kinds[name] for name in names_of(node.inputs)}
            if self._kind(node) is not Kind.POOLED or kinds.isdisjoint(_OF_CHUNK):
                continue
            combination = pooling(node, self.constants)
            if Kind.PLACE in kinds:
                combination = "marked"
            if combination is not None:
                pooled[str(node.outputs[0].name)] = combination
        return pooled

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

    def _rows(self) -> dict[str, int]:
        """Return products of rows, and the weights read for each, with the numbers of a token."""
        made = [node.outputs[0] for node in self.nodes if node.op_type in _OF_ROWS]
        rows = [value for value in made if self.kinds[str(value.name)] is Kind.ROWS]
        document = self.dims[self.main][:2]
        return {str(v.name): numbers_of_token(v, self.kinds, document) for v in rows}

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

    @cached_property
    def _choosing(self) -> set[ir.Node]:
        """The nodes that only choose a token: they need nothing but the inputs of the model."""
        needed, choosing = set(self.outputs), set()
        for node in reversed(self.nodes):
            if self._kind(node) is Kind.PLACE or needed.isdisjoint(names_of(node.outputs)):
                choosing.add(node)
            else:
                needed.update(names_of(node.inputs))
        return choosing

    def _width(self, name: str) -> float:
        width = self.dims.get(name, [""])[-1]
        return width if isinstance(width, int) else np.inf

    def _is_needed(self, sources: Iterable[str], without: str, end: int) -> bool:
        """Return whether nodes from ``end`` on, pooled values or outputs depend on ``sources``.

        Dependences through the value ``without`` do not count.
        """
        made = set(sources) - {without}
        for index, node in enumerate(self.nodes):
            if (
                node in self._choosing
                or node.op_type == "Shape"
                or not made.intersection(names_of(node.inputs))
            ):
                continue
            new = set(names_of(node.outputs)) - {without}
            is_late = self._kind(node) in (Kind.POOLED, Kind.COMBINED)
            if index >= end or is_late or new.intersection(self.outputs):
                return True
            made.update(new)
        return not made.isdisjoint(self.outputs)


def _maker(node: ir.Node) -> Callable[[GraphParts, ir.Node, list[str], list[str]], _AnyStage]:
    """Return the function that makes the graphs of an operator of ours."""
    if is_recurrence(node):
        return make_recurrence_stage
    return make_softmax_stage if is_softmax(node) else make_stage


def _uses_last_stage(tokens: ir.Model, stages: Sequence[_AnyStage]) -> bool:
    results = {name for stage in stages[-1:] for name in names_of(stage.apply.graph.outputs)}
    return not results.isdisjoint(names_of(tokens.graph.inputs))
