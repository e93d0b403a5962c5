"""Search for decomposed mechanisms in an ONNX graph, each replaced by one operator if equal.

Every value is read as a formula and compared with the patterns. Last values come first, so that a
gate is found together with the mean that it multiplies.

Runs cannot tell two kinds of rewrites apart, which ``Cuts`` and ``reads_nan`` refuse. A slice of
the first 1,000 tokens takes all tokens of every probed run, so a comparison of both results finds
no difference. A row without keys is NaN in PyTorch, and ``nan_to_num`` replaces it; the operators
return finite numbers for such a row, which a guard does not replace.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.lowering import nodes as matching
from aftexport.operators.domain import DOMAIN, VERSION
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.recognition.algebra import multiply
from aftexport.recognition.attention.rewrite import replace_attention
from aftexport.recognition.comparison import (
    Part,
    ProofError,
    Verdict,
    compare,
    in_float64,
    part_of,
    runner,
)
from aftexport.recognition.graph.normalize import remove_no_ops
from aftexport.recognition.graph.shape_probe import NoRunnableSizes, ProbedGraph, probe
from aftexport.recognition.patterns import PATTERNS, feature_products
from aftexport.recognition.patterns.failed_conditions import (
    POOLING_CONDITIONS,
    failed_condition,
    has_pairs,
    layout_condition,
)
from aftexport.recognition.patterns.pattern import (
    NearMissFound,
    Operand,
    Rewrite,
    Subject,
    without_outside,
)
from aftexport.recognition.projections import (
    CostlyTransposes,
    fold_transposes,
    transposes_cost_more,
)
from aftexport.recognition.read import layout
from aftexport.recognition.read.formulas import FORMULAS, PRODUCT_FORMULAS, PRODUCT_FUNCTIONS
from aftexport.recognition.read.reader import Reader
from aftexport.recognition.result import POOLING, Match, NearMiss, Recognition
from aftexport.recognition.terms import ONE, Axis, Dims, Product, Unreadable
from aftexport.recognition.writer import Writer, write_nodes

_LAST_OPERATORS = frozenset({
    "Add", "Cast", "Div", "Einsum", "Expand", "Flatten", "MatMul", "Mul", "ReduceSum",
    "Reshape", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
"""The operators that can be the last node of a mechanism."""
_WEIGHT_OPERATORS = frozenset(
    ("Exp", "Softmax", "Elu", "Relu", "Where", "Max", "LogSoftmax", "ReduceLogSumExp")
)
"""The operators of which a graph with a mechanism has one, unless a node multiplies inputs."""
NO_SUM = "there is no weighted sum over tokens"
_LAYOUTS = (*layout.FORMULAS, "Slice", "Split")
_ANY_SUM = "weighted sum"
"""The name of a near miss of any mechanism."""
_Missed = tuple[NearMiss, ir.Node, set[ir.Node]]
"""A near miss, its last node, and all nodes that it is computed by."""


def recognize(
    model: ir.Model, progress: Callable[[int, int, str], None] | None = None
) -> Recognition:
    """Replace the mechanisms of a graph in place, and return the result of the search.

    In a graph with operators of the domain, only softmax attention is searched. ``progress`` gets
    the number of nodes read, the number of all nodes and a label.
    """
    has_operators = any(node.domain == DOMAIN for node in model.graph)
    if not any(node.op_type in _WEIGHT_OPERATORS or _may_weigh(node) for node in model.graph):
        return Recognition(absence=NO_SUM)
    try:
        probed = probe(attach_bodies(ir.to_proto(model)))
    except NoRunnableSizes as error:
        return Recognition(unexamined=str(error))
    doubtful = remove_no_ops(model, probed)
    cuts = Cuts(model, doubtful)
    attention = replace_attention(model, probed, cuts.check)
    if has_operators:
        return attention
    told = {miss.value for miss in attention.near_misses}
    recognition = _Recognizer(model, probed, cuts, told).run(progress or (lambda *_: None))
    fold_transposes(model, probed)
    recognition.matches[:0] = attention.matches
    recognition.near_misses[:0] = attention.near_misses
    overridable = [name for name, v in model.graph.initializers.items() if v.is_graph_input()]
    if (
        overridable
        and not recognition.matches
        and all(m.mechanism in (POOLING, _ANY_SUM) for m in recognition.near_misses)
    ):
        recognition.unexamined = (
            f"{len(overridable)} of the weights are inputs too, as {overridable[0]},"
            " and may be any numbers: export the model without keep_initializers_as_inputs"
        )
    if not recognition.matches and not recognition.near_misses:
        recognition.absence = NO_SUM
        if recognition.unread:
            recognition.absence += (
                f" in the values with a formula; {recognition.unread[0]} has none"
            )
    return recognition


def _part_note(miss: _Missed | None, reason: str) -> str:
    """Return the note of a match that is a part of a mechanism, with the condition that failed."""
    reason = miss[0].reason if miss is not None else reason
    return f"the product only, since {reason}" if reason else "a product without a normalizer"


def _is_read_by(node: ir.Node, part: set[ir.Node]) -> bool:
    """Return whether some nodes read the output of a node, or parts of it in another layout."""
    pending, seen = [node], set[ir.Node]()
    while pending:
        reader = pending.pop()
        if reader in part:
            return True
        if reader not in seen and (reader is node or reader.op_type in _LAYOUTS):
            seen.add(reader)
            pending += [user for output in reader.outputs for user, _ in output.uses()]
    return False


def _is_multiplied(node: ir.Node, last: ir.Node) -> bool:
    """Return whether a node is multiplied or divided, and nothing else, to give another's value."""
    pending, seen = [last], set[ir.Node]()
    while pending:
        above = pending.pop()
        if above is node:
            return above is not last
        if above not in seen and above.op_type in ("Mul", "Div", *layout.FORMULAS):
            seen.add(above)
            pending += [of for v in above.inputs if v is not None and (of := v.producer())]
    return False


def _may_weigh(node: ir.Node) -> bool:
    """Return whether a node may be a sum of products without constant factors."""
    constants = [v for v in node.inputs if v is not None and v.const_value is not None]
    return node.op_type in ("CumSum", "ReduceSum") or (
        node.op_type in ("Einsum", "MatMul") and not constants
    )


class _Recognizer:
    def __init__(
        self, model: ir.Model, probed: ProbedGraph, cuts: "Cuts", told: Collection[str]
    ) -> None:
        """Prepare a search; ``told`` has the values of other near misses."""
        self._model = model
        self._cuts = cuts
        self._probed = probed
        self._opset = model.opset_imports[""]
        # Nodes are visited from the last: values read later do not depend on replaced nodes.
        self._reader = Reader(probed, FORMULAS, model.graph)
        self._product_reader = Reader(probed, PRODUCT_FORMULAS, model.graph, PRODUCT_FUNCTIONS)
        self._told = {node for node in model.graph if node.outputs[0].name in told}
        self._covered: set[ir.Node] = set()
        self._settled: set[ir.Node] = set()
        self._replaced: set[ir.Value] = set()
        self._missed: list[_Missed] = []
        self._sums: list[_Missed] = []
        self._explained: set[ir.Node] = set()
        self._result = Recognition(probed=probed)

    def run(self, progress: Callable[[int, int, str], None]) -> Recognition:
        nodes = list(self._model.graph)
        for done, node in enumerate(reversed(nodes)):
            progress(done, len(nodes), "nodes read")
            # A node that only computed a shape for replaced nodes is no longer in the graph.
            if (
                node.graph is not None
                and node.op_type in _LAST_OPERATORS
                and node not in self._covered
            ):
                self._examine(node.outputs[0])
        self._result.matches.reverse()
        # A sum with other factors has a reason of its own, and they do not.
        self._missed = [miss for miss in self._missed if not self._is_factor(miss[1])]
        # A near miss inside a larger one, or inside a match, is not reported.
        parts = Counter(node for _, _, part in self._missed for node in part)
        for miss, end, part in reversed(self._missed):
            is_outermost = parts[end] == (end in part)
            if is_outermost and not part & self._settled:
                self._result.near_misses.append(miss)
        self._result.near_misses += self._other_sums()
        return self._result

    def _other_sums(self) -> list[NearMiss]:
        """Return the weighted sums that no match and no near miss of a mechanism includes."""
        told = self._told | self._covered | {end for _, end, _ in self._missed}
        named = {node for _, _, part in self._missed for node in part}
        return [
            miss
            for miss, end, part in reversed(self._sums)
            if not (part & told or _is_read_by(end, named))
        ]

    def _is_factor(self, end: ir.Node) -> bool:
        """Return whether a near miss is a factor of a weighted sum that is another near miss."""
        return any(end in part and _is_multiplied(end, last) for _, last, part in self._sums)

    def _examine(self, value: ir.Value) -> None:
        if not self._probed.is_float(value):
            return
        subject, miss = self._match_patterns(value)
        if value not in self._replaced:
            miss = self._match_products(value, miss)
        if value in self._replaced:
            return
        if miss is not None:
            self._missed.append(miss)
        elif subject is None:
            self._result.unread.append(str(value.name))
        elif value.producer() not in self._explained:
            try:
                condition = failed_condition(subject)
            except Unreadable:
                condition = None  # its gate has no formula
            if condition is not None:
                mechanism = POOLING if condition in POOLING_CONDITIONS else _ANY_SUM
                left = self._near_miss(mechanism, value, condition, subject.reader)
                self._sums.append(left)
                self._explained |= left[2]

    def _match_patterns(self, value: ir.Value) -> tuple[Subject | None, _Missed | None]:
        """Replace a value if a pattern matches it, or return its formula and the near miss."""
        subject: Subject | None = None
        read: tuple[Product, Dims, Reader, int] | None = None
        for mechanism, pattern in PATTERNS.items():
            # A pattern may split axes of the formula. The next pattern then gets a new one.
            if read is None or read[-1] != Axis.splits:
                read = self._read(value, self._reader)
            if read is None:
                break  # the value has no formula
            formula, dims, reader, _ = read
            reader = reader.copy()
            try:
                subject = Subject(formula, dims, reader, self._probed, self._opset)
                bare, outside = without_outside(subject)
                rewrite = pattern(bare)
                if rewrite is not None:
                    rewrite = replace(rewrite, outside=multiply(rewrite.outside, outside))
                    self._replace(value, dims, rewrite, reader)
                    break
            except NearMissFound as miss:
                if subject is not None and has_pairs(subject):
                    break  # dot-product attention fails other conditions too
                return subject, self._near_miss(mechanism, value, str(miss), reader, miss.remedy)
            except Unreadable:
                continue
        return subject, None

    def _match_products(self, value: ir.Value, miss: _Missed | None) -> _Missed | None:
        """Replace a value if it is a product of features and values, or return the near miss."""
        read = self._read(value, self._product_reader)
        if read is None:
            return miss
        formula, dims, reader, _ = read
        try:
            rewrite = feature_products.match(
                Subject(formula, dims, reader, self._probed, self._opset)
            )
            if rewrite is not None:
                if rewrite.is_part:
                    rewrite = replace(rewrite, note=_part_note(miss, rewrite.note))
                self._replace(value, dims, rewrite, reader)
        except NearMissFound as other:
            if miss is not None and not isinstance(other, CostlyTransposes):
                return miss
            return self._near_miss("linear_attention", value, str(other), reader)
        except Unreadable:
            return miss
        return miss

    def _read(self, value: ir.Value, by: Reader) -> tuple[Product, Dims, Reader, int] | None:
        """Return formula and dims of a value, its reader, and the number of axes split by then."""
        reader = by.blank_copy()
        try:
            return *reader.read_output(value), reader, Axis.splits
        except Unreadable:
            return None

    def _near_miss(
        self, mechanism: str, value: ir.Value, reason: str, reader: Reader, remedy: str = ""
    ) -> _Missed:
        end = value.producer()
        assert end is not None
        part = part_of(value, reader.ends, self._probed).nodes
        return NearMiss(mechanism, str(value.name), reason, remedy), end, {*part}

    def _replace(self, value: ir.Value, dims: Dims, rewrite: Rewrite, reader: Reader) -> None:
        """Write the rewrite, compare it, and put it into the graph; raises NearMissFound."""
        dtype = self._probed.dtype(value)
        if dtype == np.float64:
            raise NearMissFound("it is computed in float64")
        if may_lack_keys(self._model, rewrite) and reads_nan(value):
            raise NearMissFound(
                "a guard after it replaces NaN, but the operator has numbers in a row without keys"
            )
        writer = Writer(self._probed, dtype, str(value.name), reader.shapes)
        try:
            output, before, verdict = self._prove_rewrite(value, dims, rewrite, reader, writer)
        except NearMissFound:
            writer.discard()
            raise
        self._insert(value, output, writer, dtype)
        self._replaced.add(value)
        self._covered |= before
        if not rewrite.is_part:
            self._settled |= before
        self._result.matches.append(
            Match(
                rewrite.mechanism,
                rewrite.op_type,
                str(value.name),
                dict(rewrite.attributes),
                verdict.cases,
                verdict.excess,
                rewrite.note,
            )
        )

    def _prove_rewrite(
        self, value: ir.Value, dims: Dims, rewrite: Rewrite, reader: Reader, writer: Writer
    ) -> tuple[ir.Value, set[ir.Node], Verdict]:
        """Write the rewrite and compare it; return its output, the old nodes and the result."""
        try:
            output = write_nodes(writer, rewrite, dims)
        except Unreadable:
            raise NearMissFound(layout_condition(rewrite)) from None
        ends = [end for end in reader.ends if end not in rewrite.opened]
        before = part_of(value, ends, self._probed)
        self._cuts.check(before, ends)
        after = part_of(output, ends, self._probed, writer.constants)
        if transposes_cost_more(writer.nodes, {*before.nodes} - {*after.nodes}, self._probed):
            raise CostlyTransposes
        operator = in_float64(ALL_OPERATORS[rewrite.op_type], rewrite.attributes)
        try:
            verdict = compare(
                runner(before, self._opset),
                runner(after, self._opset, operator),
                {**dict.fromkeys(before.inputs), **dict.fromkeys(after.inputs)},
                self._probed,
                rewrite.lowest,
            )
        except ProofError as error:
            raise NearMissFound(str(error)) from error
        if not verdict.holds:
            raise NearMissFound(f"in float64 it differs ({verdict.case})")
        return output, {*before.nodes}, verdict

    def _insert(
        self, value: ir.Value, output: ir.Value, writer: Writer, dtype: np.dtype[np.generic]
    ) -> None:
        for constant, array in writer.constants.items():
            kept = array if array.dtype.kind == "i" else array.astype(dtype)
            constant.const_value = ir.tensor(kept, name=constant.name)
            self._model.graph.register_initializer(constant)
        last = value.producer()
        assert last is not None
        self._model.graph.insert_after(last, writer.nodes)
        self._model.opset_imports[DOMAIN] = VERSION
        matching.take_place(value, output)
        RemoveUnusedNodesPass()(self._model)


class Cuts:
    """The nodes above each value that may cut long documents."""

    def __init__(self, model: ir.Model, doubtful: Collection[ir.Node]) -> None:
        """Find those nodes, once for the whole graph.

        The ``doubtful`` nodes may cut.
        """
        self._doubtful = doubtful
        self._above: dict[ir.Value, frozenset[ir.Node]] = {}
        for node in model.graph if doubtful else ():
            if node.op_type in ("Shape", "Size"):
                continue
            above = frozenset[ir.Node]().union(*(self._cuts_of(v) for v in node.inputs))
            above |= {node} if node in doubtful else set()
            self._above |= dict.fromkeys(node.outputs, above)

    def check(self, part: Part, ends: Iterable[ir.Value]) -> None:
        """Raise NearMissFound if a part cuts, or reads both tensors that are cut and others."""
        cuts = {node for node in part.nodes if node in self._doubtful}
        sets = {self._cuts_of(end) for end in ends}
        if len(sets) > 1:
            cuts |= frozenset.union(*sets) - frozenset.intersection(*sets)
        for node in cuts:
            raise NearMissFound(
                f"{node.outputs[0].name} may take a part of documents longer than were tried"
            )

    def _cuts_of(self, value: ir.Value | None) -> frozenset[ir.Node]:
        return self._above.get(value, frozenset()) if value is not None else frozenset()


_DOCUMENT_INPUTS = {"input_ids", "input_features", "lengths"}


def reads_nan(value: ir.Value) -> bool:
    """Return whether a guard reads a value, or a value that is computed from it."""
    pending, seen = [value], {value}
    while pending:
        for node in pending.pop().consumers():
            if node.op_type == "IsNaN" or (
                node.op_type == "Equal" and node.inputs[0] is node.inputs[1]
            ):
                return True
            after = [output for output in node.outputs if output not in seen]
            seen.update(after)
            pending += after
    return False


def may_lack_keys(model: ir.Model, rewrite: Rewrite) -> bool:
    """Return whether a row may have no key that counts.

    The model of a bundle has a key for every row, since each document has at least one token.
    """
    if {value.name for value in model.graph.inputs} <= _DOCUMENT_INPUTS:
        return False
    operands = [operand for operand in rewrite.operands if isinstance(operand, Operand)]
    is_masked = any(operand.weights != ONE or operand.floored for operand in operands)
    return is_masked or rewrite.extra_head
