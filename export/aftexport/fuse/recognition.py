"""Finds decomposed mechanisms in an ONNX graph and makes each one operator, once proven equal.

Every value is read as a formula and held against the patterns in ``mechanisms``, the last ones
first, so that a gate is found together with what it gates.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.domain import DOMAIN, VERSION
from aftexport.fuse import _matching as matching
from aftexport.fuse.atoms import Product
from aftexport.fuse.axes import Axis, Dims, LayoutError, flat
from aftexport.fuse.measured import Measured, UnmeasurableError, measure
from aftexport.fuse.mechanisms import PATTERNS
from aftexport.fuse.pattern import NearMissError, Operand, Rewrite, Subject, size_of
from aftexport.fuse.proof import ProofError, compare, in_float64, part_of, runner
from aftexport.fuse.reading import Reader
from aftexport.fuse.writing import Writer
from aftexport.registry import ALL_OPERATORS

_ENDS = frozenset({
    "Add", "Cast", "Div", "Einsum", "Expand", "Flatten", "MatMul", "Mul", "ReduceSum",
    "Reshape", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
"""What the last node of a mechanism may be."""
_SIGNS = frozenset(
    ("Exp", "Softmax", "Elu", "Relu", "Where", "Max", "LogSoftmax", "ReduceLogSumExp")
)
"""Without any of these in it, a graph has no mechanism."""


@dataclass(frozen=True)
class Match:
    """A rewrite that was made.

    Attributes:
        mechanism: the stem of its file.
        operator: of the domain.
        value: the name of what it computes.
        attributes: of the operator.
        cases: inputs on which both were compared.
        difference: the largest, over what was allowed.
        note: where attributes are not the graph's, why, and to what effect.
    """

    mechanism: str
    operator: str
    value: str
    attributes: dict[str, int | float | str]
    cases: int
    difference: float
    note: str = ""


@dataclass(frozen=True)
class NearMiss:
    """A place that was left alone.

    Attributes:
        mechanism: what it resembles.
        value: the name of what it computes.
        reason: the condition that failed.
    """

    mechanism: str
    value: str
    reason: str


@dataclass
class Recognition:
    """What was found in a graph.

    Attributes:
        matches: what was rewritten, in the order of the graph.
        near_misses: what was not, though it resembles a mechanism.
        unexamined: why the graph could not be looked at.
        measured: the values of the graph before; None where there was nothing to look for.
    """

    matches: list[Match] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    unexamined: str = ""
    measured: Measured | None = None


def recognise(
    model: ir.Model, progress: Callable[[int, int, str], None] | None = None
) -> Recognition:
    """Rewrites ``model``, which is normalised and has no model-local functions, in place.

    Args:
        model: the graph that is searched.
        progress: told how many of the graph's nodes were read, out of how many.
    """
    if not any(node.op_type in _SIGNS for node in model.graph):
        return Recognition()
    try:
        measured = measure(ir.to_proto(model))
    except UnmeasurableError as error:
        return Recognition(unexamined=str(error))
    found = _Recogniser(model, measured).run(progress or (lambda *_: None))
    given = [name for name, v in model.graph.initializers.items() if v.is_graph_input()]
    if given and not found.matches and not found.near_misses:
        found.unexamined = (
            f"{len(given)} of its weights are inputs too, as {given[0]}, and may be any numbers:"
            " export it without keep_initializers_as_inputs"
        )
    return found


class _Recogniser:
    def __init__(self, model: ir.Model, measured: Measured) -> None:
        self._model = model
        self._measured = measured
        self._opset = model.opset_imports[""]
        # From the last node on: nothing that is read later rests on what was replaced before.
        self._reader = Reader(measured, model.graph)
        self._covered: set[ir.Node] = set()
        self._missed: list[tuple[NearMiss, ir.Node, set[ir.Node]]] = []
        self._result = Recognition(measured=measured)

    def run(self, progress: Callable[[int, int, str], None]) -> Recognition:
        nodes = list(self._model.graph)
        for done, node in enumerate(reversed(nodes)):
            progress(done, len(nodes), "nodes read")
            # A node that only gave a shape to what was replaced is gone.
            if node.graph is not None and node.op_type in _ENDS and node not in self._covered:
                self._examine(node.outputs[0])
        self._result.matches.reverse()
        # What a miss ends in lies in a larger one, or in a match, where that is the better reading.
        parts = Counter(node for _, _, part in self._missed for node in part)
        for miss, end, part in reversed(self._missed):
            is_alone = parts[end] == (end in part)
            if is_alone and not part & self._covered:
                self._result.near_misses.append(miss)
        return self._result

    def _examine(self, value: ir.Value) -> None:
        if not self._measured.is_float(value):
            return
        read: tuple[Product, Dims, Reader, int] | None = None
        for mechanism, pattern in PATTERNS.items():
            # A pattern may split axes of the formula: then the next one gets another.
            if read is None or read[-1] != Axis.splits:
                read = self._read(value)
            if read is None:
                return  # no formula can be made of it
            formula, dims, reader, _ = read
            reader = reader.copy()
            try:
                subject = Subject(formula, dims, reader, self._measured, self._opset)
                rewrite = pattern(subject)
                if rewrite is not None:
                    self._replace(value, dims, rewrite, list(reader.ends))
                    return
            except NearMissError as miss:
                end = value.producer()
                assert end is not None
                part = part_of(value, reader.ends, self._measured).nodes
                self._missed.append((NearMiss(mechanism, str(value.name), str(miss)), end, {*part}))
                return
            except (LayoutError, ArithmeticError, ValueError):
                continue

    def _read(self, value: ir.Value) -> tuple[Product, Dims, Reader, int] | None:
        """A value's formula and dims, what read it, and how many axes had been split by then."""
        reader = self._reader.anew()
        try:
            return *reader.read_output(value), reader, Axis.splits
        except (LayoutError, ArithmeticError, ValueError):
            return None

    def _replace(self, value: ir.Value, dims: Dims, rewrite: Rewrite, ends: list[ir.Value]) -> None:
        """Writes the rewrite, proves it, and puts it into the graph; raises NearMissError."""
        dtype = self._measured.dtype(value)
        if dtype == np.float64:
            raise NearMissError("it is computed in float64")
        writer = Writer(self._measured, dtype, str(value.name))
        try:
            output = _write(writer, rewrite, dims)
        except LayoutError:
            raise NearMissError("its tensors cannot be laid out as [B, T, D]") from None
        ends = [end for end in ends if end not in rewrite.opened]
        before = part_of(value, ends, self._measured)
        after = part_of(output, ends, self._measured, writer.constants)
        proven = {**rewrite.attributes, **rewrite.proven}
        operator = in_float64(ALL_OPERATORS[rewrite.op_type], proven)
        try:
            verdict = compare(
                runner(before, self._opset),
                runner(after, self._opset, operator),
                {**dict.fromkeys(before.inputs), **dict.fromkeys(after.inputs)},
                self._measured,
                rewrite.lowest,
            )
        except ProofError as error:
            raise NearMissError(str(error)) from error
        if not verdict.holds:
            raise NearMissError(f"in float64 it differs ({verdict.case})")
        self._insert(value, output, writer, dtype)
        self._covered |= set(before.nodes)
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


def _write(writer: Writer, rewrite: Rewrite, dims: Dims) -> ir.Value:
    written = {id(operand): operand for operand in rewrite.operands}
    values = {name: _operand(writer, rewrite, operand) for name, operand in written.items()}
    inputs = [values[id(operand)] for operand in rewrite.operands]
    batch = writer.node("Shape", inputs[0], start=0, end=1)
    tokens = writer.node("Shape", inputs[0], start=1, end=2)
    inputs.append(writer.node("Expand", tokens, batch))
    own = {a.name: a.default for a in ALL_OPERATORS[rewrite.op_type].kernel_attributes}
    node = matching.custom_node(rewrite.op_type, inputs, {**own, **rewrite.attributes})
    writer.nodes.append(node)
    node.outputs[0].name = f"{writer.prefix}_{rewrite.op_type}"
    output = node.outputs[0]
    if rewrite.extra_head:
        output = writer.without_head(output, size_of(flat(rewrite.groups[2])))
    return writer.laid_out(output, rewrite.groups, dims)


def _operand(writer: Writer, rewrite: Rewrite, operand: Operand | NDArray[np.float64]) -> ir.Value:
    if not isinstance(operand, Operand):
        return writer.constant(operand)
    if operand.weights.factors:
        return writer.plus_log(operand.formula, operand.weights, operand.groups)
    if rewrite.extra_head:
        channels, heads = size_of(flat(operand.groups[2])), int(rewrite.attributes["num_heads"]) - 1
        return writer.with_head(operand.formula, operand.groups, channels // heads, operand.beside)
    value = writer.tensor(operand.formula, operand.groups)
    return writer.floored(value) if operand.floored else value
