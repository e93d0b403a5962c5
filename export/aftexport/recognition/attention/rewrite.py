"""Softmax attention of a graph, replaced by the operator if both are equal in float64."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.errors import EngineError
from aftexport.lowering.graph_values import value_names
from aftexport.lowering.nodes import NewNodes, custom_node, take_place
from aftexport.operators.domain import DOMAIN, VERSION
from aftexport.operators.mechanisms.softmax_attention import SOFTMAX_ATTENTION
from aftexport.recognition.attention.masks import (
    MaskForm,
    SizeRunner,
    identify,
    lengths_of,
    sink_of,
)
from aftexport.recognition.attention.operands import (
    Indices,
    Operand,
    Reading,
    grouped,
    is_result,
    runs_of,
)
from aftexport.recognition.attention.rotary import Rotary, rotated, same_tables
from aftexport.recognition.attention.structure import Attention, Content, attention_of
from aftexport.recognition.comparison import (
    NUMBERS,
    Part,
    ProofError,
    Verdict,
    excess_of,
    in_float64,
    part_of,
    run_once,
    runner,
)
from aftexport.recognition.graph.shape_probe import Arrays, ProbedGraph
from aftexport.recognition.patterns.pattern import NearMissFound
from aftexport.recognition.result import Match, NearMiss, Recognition
from aftexport.system.contract import LENGTHS

Array = NDArray[np.generic]

_MOVES = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten")
_ROWS = 3
"""The axes of an operand or result of the operator."""
_SMALL_NUMBERS = ("ordinary", "constant", "tiny", "vanishing")
"""The cases whose scores are far from a finite number such as -10,000 that hides a key."""
_FINITE = -1e30
_TYPES: set[np.dtype[np.generic]] = {np.dtype(np.float32), np.dtype(np.float16)}


def replace_attention(
    model: ir.Model, probed: ProbedGraph, check_cuts: Callable[[Part, Collection[ir.Value]], None]
) -> Recognition:
    """Replace softmax attention in a graph, in place, and return matches and near misses.

    ``check_cuts`` raises NearMissFound for a part that may cut long documents.
    """
    result = Recognition(probed=probed)
    softmaxes = [node for node in model.graph if node.op_type == "Softmax" and node.domain == ""]
    if softmaxes:
        rewriter = _Rewriter(model, probed, check_cuts)
        for softmax in softmaxes:
            try:
                match = rewriter.replace(softmax)
            except (NearMissFound, ProofError, EngineError) as miss:
                reason = str(miss)
                result.near_misses.append(
                    NearMiss(SOFTMAX_ATTENTION.stem, str(softmax.outputs[0].name), reason)
                )
                continue
            if match is not None:
                result.matches.append(match)
        RemoveUnusedNodesPass()(model)
    return result


@dataclass
class _Plan:
    """The inputs and attributes of an operator in place of one attention."""

    attention: Attention
    query: Operand
    key: Operand
    value: Operand
    groups: int
    form: MaskForm
    sink: Array | None
    scale: float
    target: ir.Value  # the result
    is_by_token: bool  # whether the target is [B, T, H e] in some axes, or else [B, H, T, e]
    rotary: Rotary | None
    tables: tuple[ir.Value, ...]  # the cosines and sines in the graph

    @property
    def heads(self) -> int:
        return len(self.query.channels)

    @property
    def sources(self) -> list[ir.Value]:
        """The values that the operands are parts of."""
        operands = (self.query, self.key, self.value)
        return list(dict.fromkeys(operand.source for operand in operands))

    @property
    def attributes(self) -> dict[str, float | str]:
        own = self.key.channels.shape[1] == self.value.channels.shape[1]
        found: dict[str, float | str] = {
            "num_heads": self.heads,
            "scale": self.scale,
            "window_left": self.form.window_left,
            "window_right": self.form.window_right,
        }
        if self.attention.softcap:
            found["softcap"] = self.attention.softcap
        if self.groups != self.heads or not own:
            found["kv_num_heads"] = self.groups
        if self.rotary is not None:
            found["interleaved"] = int(self.rotary.interleaved)
        return found


class _Rewriter:
    def __init__(
        self,
        model: ir.Model,
        probed: ProbedGraph,
        check_cuts: Callable[[Part, Collection[ir.Value]], None],
    ) -> None:
        self._model = model
        self._probed = probed
        self._check_cuts = check_cuts
        self._content = Content()
        self._sizes = SizeRunner(model, probed)
        self._taken = value_names(model.graph)
        self._caches: dict[Rotary, tuple[ir.Value, ir.Value]] = {}
        self._forms: dict[object, MaskForm | NearMissFound] = {}

    def replace(self, softmax: ir.Node) -> Match | None:
        """Replace one attention; None for a softmax that is none.

        Raises:
            NearMissFound: if it is of another form.
            ProofError: if it cannot be compared.
        """
        attention = attention_of(softmax, self._probed, self._content)
        if attention is None:
            return None
        plan = self._plan(attention)
        new = NewNodes(self._model.graph, str(plan.target.name), self._taken)
        caches = dict(self._caches)
        output = _Writer(caches, new, self._model, self._probed).write(plan)
        try:
            verdict = self._prove(plan, output)
        except (NearMissFound, ProofError):
            for node in new.nodes:
                for place in range(len(node.inputs)):
                    node.replace_input_with(place, None)
            raise
        last = plan.target.producer()
        assert last is not None
        self._caches = caches
        self._model.graph.insert_after(last, new.nodes)
        self._model.opset_imports[DOMAIN] = VERSION
        take_place(plan.target, output)
        shown = {k: v for k, v in plan.attributes.items() if not k.startswith("window") or v != -1}
        return Match(
            SOFTMAX_ATTENTION.stem,
            SOFTMAX_ATTENTION.op_type,
            str(output.name),
            shown,
            verdict.cases,
            verdict.excess,
        )

    def _plan(self, attention: Attention) -> _Plan:
        probed, product, output = self._probed, attention.product, attention.output
        lead = [run[str(product.outputs[0].name)].shape[:-2] for run in runs_of(probed)]
        last = [run[str(output.outputs[0].name)].shape[:-2] for run in runs_of(probed)]
        operands = [product.inputs[0], product.inputs[1], output.inputs[1]]
        query_value, key_value, value_value = (v for v in operands if v is not None)
        readings = (
            Reading(query_value, probed, lead),
            Reading(key_value, probed, lead, is_turned=True),
        )
        value = Reading(value_value, probed, last, is_scaled=False).operand()
        query, key, rotary, tables = self._rotated(*readings)
        heads = len(query.channels)
        if not len(key.channels) == len(value.channels) == heads:
            raise NearMissFound("its keys and values have other heads")
        tokens = [
            [run[str(one.source.name)].shape[one.order[1]] for run in runs_of(probed)]
            for one in (query, key, value)
        ]
        if not tokens[0] == tokens[1] == tokens[2]:
            raise NearMissFound("its keys have other tokens than its queries")
        groups = len(grouped(key.channels, value.channels))
        target, is_by_token = self._target(output, heads)
        kinds = {probed.dtype(v) for v in (query.source, key.source, value.source, target)}
        if len(kinds) > 1 or not kinds <= _TYPES:
            raise NearMissFound("its operands are not all in float32 or all in float16")
        scale = attention.scale * query.scale * key.scale
        if scale <= 0:
            raise NearMissFound(f"it multiplies its scores by {scale:g}")
        form = self._form(attention, heads)
        sink = None
        if attention.sink is not None:
            if self._content.has(attention.sink):
                raise NearMissFound("its sink depends on the inputs")
            sink = sink_of(attention.sink, product.outputs[0], self._sizes, heads)
        return _Plan(
            *(attention, query, key, value, groups, form, sink, scale, target, is_by_token),
            rotary,
            tables,
        )

    def _rotated(
        self, query: Reading, key: Reading
    ) -> tuple[Operand, Operand, Rotary | None, tuple[ir.Value, ...]]:
        """Return query and key before their rotation, or after it if it stays."""
        first = rotated(query, self._content, self._sizes)
        second = None if first is None else rotated(key, self._content, self._sizes)
        if (
            first is None
            or second is None
            or not same_tables(first.rotary, second.rotary, self._sizes)
        ):
            return query.operand(), key.operand(), None, ()
        tables = tuple(dict.fromkeys((*first.tables, *second.tables)))
        return first.operand, second.operand, first.rotary, tables

    def _form(self, attention: Attention, heads: int) -> MaskForm:
        """Return the meaning of the masks, which several layers may share."""
        shape = tuple(self._probed.shapes(attention.product.outputs[0]) or ())
        key = (tuple((m.value, m.kind, m.number) for m in attention.masks), shape, heads)
        if key not in self._forms:
            try:
                product = attention.product.outputs[0]
                self._forms[key] = identify(attention.masks, product, self._sizes, heads)
            except NearMissFound as miss:
                self._forms[key] = miss
        found = self._forms[key]
        if isinstance(found, NearMissFound):
            raise found
        return found

    def _target(self, output: ir.Node, heads: int) -> tuple[ir.Value, bool]:
        """Return a value that only moves the result, and whether it has the order of tokens."""
        value = first = output.outputs[0]
        found: dict[int, ir.Value] = {}
        while True:
            rank = len((self._probed.shapes(value) or [()])[0])
            if rank not in found and is_result(value, first, self._probed, heads):
                found[rank] = value
            readers = {user for user, _ in value.uses()}
            if _ROWS in found or len(readers) != 1 or value.is_graph_output():
                break
            (node,) = readers
            if node.op_type not in _MOVES or node.inputs[0] is not value:
                break
            value = node.outputs[0]
        for rank in (_ROWS, 2, 4):
            if rank in found:
                return found[rank], True
        if {len(shape) for shape in self._probed.shapes(first) or ()} != {4}:
            raise NearMissFound("its result does not keep the heads as channels of one value")
        return first, False

    def _prove(self, plan: _Plan, output: ir.Value) -> Verdict:
        """Compare the operator with the nodes that it replaces, at the tokens of documents.

        Raises:
            NearMissFound: if they differ.
            ProofError: if one does not run.
        """
        probed, masks = self._probed, plan.attention.masks
        values = dict.fromkeys((*(mask.value for mask in masks), *plan.tables))
        given = [value for value in values if value.const_value is None]
        ends = [*plan.sources, *given]
        before = part_of(plan.target, ends, probed)
        self._check_cuts(before, plan.sources)
        after = part_of(output, ends, probed)
        operator = in_float64(SOFTMAX_ATTENTION, plan.attributes)
        proof = _Proof(plan, before, after, probed, self._sizes, given)
        verdict = proof.verdict(runner(before, probed.opset), runner(after, probed.opset, operator))
        if not verdict.holds:
            raise NearMissFound(f"in float64 it differs ({verdict.case})")
        return verdict


@dataclass
class _Proof:
    plan: _Plan
    before: Part
    after: Part
    probed: ProbedGraph
    sizes: SizeRunner
    given: Sequence[ir.Value]  # masks and tables of positions
    _count: int = field(default=0, init=False)

    def verdict(self, before: ReferenceEvaluator, after: ReferenceEvaluator) -> Verdict:
        """Compare both on random numbers at each size."""
        largest, where = 0.0, ""
        numbers = [m.number for m in self.plan.attention.masks if m.kind != "added"]
        is_finite = any(m.kind == "added" for m in self.plan.attention.masks) or any(
            number > _FINITE for number in numbers
        )
        names = [name for name in NUMBERS if not is_finite or name in _SMALL_NUMBERS]
        for run in runs_of(self.probed):
            shape = run[str(self.plan.query.source.name)].shape
            batch, tokens = (shape[axis] for axis in self.plan.query.order[:2])
            lengths = self._lengths(batch, tokens)
            for place, name in enumerate(names):
                feeds = self._feeds(run, lengths, tokens, NUMBERS[name], place)
                expected, got = (
                    self._counted(run_once(one, feeds), lengths, tokens) for one in (before, after)
                )
                self._count += 1
                if expected.shape != got.shape or not np.isfinite(expected).all():
                    return Verdict(np.inf, f"{name}, {batch} x {tokens}", self._count)
                excess = excess_of(expected, got, np.isfinite(expected))
                if excess >= largest:
                    largest, where = excess, f"{name}, {batch} x {tokens}"
                if excess > 1:
                    return Verdict(excess, where, self._count)
        return Verdict(largest, where, self._count)

    def _lengths(self, batch: int, tokens: int) -> NDArray[np.int64]:
        if not self.sizes.has_lengths:
            return np.full(batch, tokens)
        return np.resize(next(lengths_of(batch, tokens)), batch)

    def _feeds(
        self,
        run: Arrays,
        lengths: NDArray[np.int64],
        tokens: int,
        numbers: Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]],
        seed: int,
    ) -> dict[str, Array]:
        feeds: dict[str, Array] = {}
        sources = self.plan.sources
        arrays = self.sizes.run(self.given, lengths, tokens) if self.given else []
        given = dict(zip(self.given, arrays, strict=True))
        for value in {*self.before.inputs, *self.after.inputs}:
            name = str(value.name)
            if value in sources:
                random = np.random.default_rng([seed, sources.index(value)])
                feeds[name] = numbers(random, run[name].shape).astype(np.float64)
            elif value in given:
                kind = given[value].dtype.kind
                feeds[name] = given[value].astype(np.float64) if kind == "f" else given[value]
            else:
                feeds[name] = lengths if name == LENGTHS else run[name]
        return feeds

    def _counted(
        self, result: NDArray[np.float64], lengths: NDArray[np.int64], tokens: int
    ) -> NDArray[np.float64]:
        """Return a result with zeros at padding, if the operator gives zeros there."""
        if not self.plan.form.is_padding_hidden:
            return result
        counted = np.arange(tokens) < lengths[:, None]
        if self.plan.is_by_token:
            rows = result.reshape(*counted.shape, -1)
            return np.where(counted[..., None], rows, 0.0).reshape(result.shape)
        return np.where(counted[:, None, :, None], result, 0.0)


@dataclass
class _Writer:
    """The new nodes of one attention."""

    # The caches of rotations that other attentions have: layers share them.
    caches: dict[Rotary, tuple[ir.Value, ir.Value]]

    new: NewNodes
    model: ir.Model
    probed: ProbedGraph

    def write(self, plan: _Plan) -> ir.Value:
        """Return the new value of the target."""
        new = self.new
        dtype = self.probed.dtype(plan.target)
        given: dict[str, ir.Value] = {
            "query": self._channels(plan.query, plan.query.channels),
            "key": self._channels(plan.key, grouped(plan.key.channels, plan.value.channels)),
            "value": self._channels(plan.value, grouped(plan.value.channels, plan.key.channels)),
        }
        if plan.sink is not None:
            given["sink"] = new.constant(plan.sink.astype(dtype))
        if plan.form.bias is not None:
            given["bias"] = new.constant(plan.form.bias.astype(dtype))
        given["lengths"] = self._lengths(plan, given["key"])
        if plan.rotary is not None:
            given["cos_cache"], given["sin_cache"] = self.caches.get(plan.rotary) or self._caches(
                plan.rotary, dtype
            )
        inputs = [given.get(name) for name in SOFTMAX_ATTENTION.inputs]
        while inputs[-1] is None:
            inputs.pop()
        (result,) = new.append(custom_node(SOFTMAX_ATTENTION.op_type, inputs, plan.attributes))
        query = given["query"]
        lead = [None, None] if query.shape is None else query.shape[:2]
        # A plan for chunks reads them in a reshape to rows.
        result.shape, result.type = ir.Shape([*lead, plan.value.channels.size]), query.type
        rank = len((self.probed.shapes(plan.target) or [()])[0])
        if plan.is_by_token and rank == _ROWS:
            return result
        if plan.is_by_token:
            shape = [0, 0, plan.heads, -1] if rank > _ROWS else [-1, plan.value.channels.size]
            return new.add("Reshape", result, new.constant(shape))
        heads = new.add("Reshape", result, new.constant([0, 0, plan.heads, -1]))
        return new.add("Transpose", heads, perm=[0, 2, 1, 3])

    def _channels(self, operand: Operand, channels: Indices) -> ir.Value:
        """Return the channels of an operand, ``[B, T, heads * d]``."""
        new, value = self.new, operand.source
        if not operand.is_in_order:
            value = new.add("Transpose", value, perm=operand.order)
        if len(operand.order) > 3:
            value = new.add("Reshape", value, new.constant([0, 0, -1]))
        shape = self.probed.runs[0][str(operand.source.name)].shape
        total = int(np.prod([shape[axis] for axis in operand.order[2:]]))
        flat = channels.reshape(-1)
        first = int(flat[0])
        if not np.array_equal(flat, np.arange(first, first + len(flat))):
            value = new.add("Gather", value, new.constant(flat), axis=2)
        elif len(flat) < total:
            bounds = [new.constant([n]) for n in (first, first + len(flat), 2)]
            value = new.add("Slice", value, *bounds)
        if value is not operand.source:  # a plan for chunks reads the width
            axes = operand.source.shape
            lead = [None, None] if axes is None else [axes[axis] for axis in operand.order[:2]]
            value.shape, value.type = ir.Shape([*lead, len(flat)]), operand.source.type
        return value

    def _caches(self, rotary: Rotary, dtype: np.dtype[np.generic]) -> tuple[ir.Value, ir.Value]:
        """Return cosines and sines ``[P, r / 2]``, of all tokens of a run."""
        new, half = self.new, rotary.width // 2
        found = []
        for table in (rotary.cosine, rotary.sine):
            shape = (self.probed.shapes(table) or [()])[0]
            value = new.cast(table, self.probed.dtype(table), dtype)
            if shape[-1] != half:
                end, step = (2 * half, 2) if rotary.interleaved else (half, 1)
                bounds = [new.constant([n]) for n in (0, end, -1, step)]
                value = new.add("Slice", value, *bounds)
            rows = new.add("Reshape", value, new.constant([-1, half]))
            rows.shape, rows.dtype = ir.Shape([None, half]), ir.DataType.from_numpy(dtype)
            found.append(rows)
        self.caches[rotary] = (found[0], found[1])
        return self.caches[rotary]

    def _lengths(self, plan: _Plan, key: ir.Value) -> ir.Value:
        """Return the number of keys of each document: all, if no padding is hidden."""
        if plan.form.is_padding_hidden:
            return next(v for v in self.model.graph.inputs if v.name == LENGTHS)
        batch, tokens = (self.new.add("Shape", key, start=n, end=n + 1) for n in (0, 1))
        return self.new.add("Expand", tokens, batch)
