"""Comparison of a rewrite with the original in float64 on adversarial inputs.

The compared part of the graph lies between the value of a formula and the tensors at which the
formula ends. Those tensors get ordinary, large, tiny and constant numbers, one entry that
dominates, entries of a batch that are many magnitudes apart, and numbers beyond any clamp.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from aftexport.engines.cast_graph import widen_nodes
from aftexport.operators.domain import DOMAIN
from aftexport.operators.schema import OnnxOperator
from aftexport.recognition.definitions import definition
from aftexport.recognition.graph.shape_probe import (
    Arrays,
    ProbedGraph,
    any_above,
    depends_on_inputs,
)
from aftexport.recognition.read import layout

Array = NDArray[np.generic]


class ProofError(Exception):
    """A part of the graph cannot be run by itself; the message has the reason."""


@dataclass(frozen=True)
class Part:
    """A part of a graph that can be run: nodes, constants, inputs and the output."""

    nodes: Sequence[ir.Node]
    constants: Mapping[str, Array]
    inputs: Sequence[ir.Value]
    output: str


def part_of(
    value: ir.Value,
    ends: Iterable[ir.Value],
    probed: ProbedGraph,
    new_constants: Mapping[ir.Value, Array] | None = None,
    max_nodes: int = sys.maxsize,  # upper bound of the part's nodes
) -> Part:
    """Return the part of the graph from ``ends`` to ``value``.

    Shapes and masks that are not computed from ``ends`` are inputs too. Of a mask and its negation,
    the mask is the input.

    Raises:
        ProofError: for more than ``max_nodes``.
    """
    boundary = _Boundary(frozenset(ends), probed)
    constants: dict[str, Array] = {}
    nodes: dict[ir.Node, None] = {}
    inputs: dict[ir.Value, None] = {}
    pending, opened = [(value, False)], 0
    while pending:
        current, is_done = pending.pop()
        node = current.producer()
        if is_done:
            assert node is not None
            nodes[node] = None
            continue
        array = (new_constants or {}).get(current, probed.constant(current))
        if array is None and probed.number(current) is not None:
            # Computed in float64, it would differ from the number that the rewrite has.
            array = probed.fixed_value(current)
        if array is not None:
            constants[str(current.name)] = array
        elif node is None or boundary.is_input(current):
            inputs[current] = None
        elif node not in nodes:
            opened += 1
            if opened > max_nodes:
                raise ProofError(f"it is computed by more than {max_nodes} nodes")
            pending.append((current, True))
            pending += [(source, False) for source in reversed(node.inputs) if source is not None]
    return Part(list(nodes), constants, list(inputs), str(value.name))


class _Boundary:
    """The boundary between the values that a part computes and the values it is given."""

    def __init__(self, ends: Collection[ir.Value], probed: ProbedGraph) -> None:
        self._ends = ends
        self._probed = probed
        self._depending: dict[ir.Value, bool] = {}

    def is_input(self, value: ir.Value) -> bool:
        """Return whether a value is given: an end, or a shape or mask not computed from ends."""
        return (
            value in self._ends
            or value.producer() is None
            or (
                self._probed.has(value)
                and not self._probed.is_float(value)
                and not _is_of_masks(value, self._probed)
                and not any_above(value, self._depending, self._depends_on_ends)
            )
        )

    def _depends_on_ends(self, value: ir.Value) -> bool | None:
        node = value.producer()
        if value in self._ends or node is None or node.op_type in ("Shape", "Size"):
            return value in self._ends
        return None


def _is_of_masks(value: ir.Value, probed: ProbedGraph) -> bool:
    """Return whether a mask is computed from other masks, which a rewrite may read instead."""
    node = value.producer()
    return (
        node is not None
        and node.op_type in ("And", "Cast", "Identity", "Not", "Or", *layout.FORMULAS)
        and probed.is_boolean(value)
        and all(probed.is_boolean(of) for of in node.inputs[:1] if of is not None)
    )


def runner(
    part: Part, opset: int, operator: Callable[..., Array] | None = None
) -> ReferenceEvaluator:
    """Return an evaluator of a part in float64.

    ``operator`` computes the one node of our domain, if the part has one.

    Raises:
        ProofError: if the evaluator does not support an operator of the part.
    """
    protos = [ir.to_proto(node) for node in part.nodes]
    widen_nodes(protos, _FLOATS, onnx.TensorProto.DOUBLE)
    constants = {name: _widened(array) for name, array in part.constants.items()}
    for node in protos:
        if node.op_type == "CumSum" and node.input[1] in constants:
            # torch.onnx writes [axis], which runtimes accept and the evaluator does not.
            constants[node.input[1]] = constants[node.input[1]].reshape(())
    value_info = [onnx.ValueInfoProto(name=str(v.name)) for v in part.inputs]
    graph = onnx.helper.make_graph(
        protos,
        "part",
        value_info,
        [onnx.ValueInfoProto(name=part.output)],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    own = [onnx.helper.make_opsetid(DOMAIN, 1)] if operator else []
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset), *own], ir_version=10
    )
    implementations = [_implementation(operator, protos)] if operator else []
    try:
        return ReferenceEvaluator(model, new_ops=implementations)
    except Exception as error:  # the evaluator of onnx, on any graph
        raise ProofError(f"it cannot be run in float64 ({error})") from error


def _implementation(operator: Callable[..., Array], nodes: Sequence[onnx.NodeProto]) -> type[OpRun]:
    def run(self: OpRun, *inputs: Array, **_: object) -> tuple[Array]:
        return (operator(*inputs),)

    (name,) = {node.op_type for node in nodes if node.domain == DOMAIN}
    return type(name, (OpRun,), {"op_domain": DOMAIN, "_run": run})


def run_once(evaluator: ReferenceEvaluator, feeds: Arrays) -> NDArray[np.float64]:
    """Return the one output of a part; overflow is silent."""
    with np.errstate(all="ignore"):
        outputs = evaluator.run(None, dict(feeds))
    assert isinstance(outputs, list)
    return np.asarray(outputs[0], np.float64)


def in_float64(operator: OnnxOperator, attributes: Mapping[str, object]) -> Callable[..., Array]:
    """Return the float64 definition of an operator as a function of arrays."""
    own = {a.name: attributes.get(a.name, a.default) for a in operator.attributes}
    return definition(operator.op_type, own)


_FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}


def _widened(array: Array) -> Array:
    is_float = array.dtype.kind == "f" or "float" in array.dtype.name
    return np.asarray(array.astype(np.float64) if is_float else array, order="C")


RELATIVE_TOLERANCE = 1e-9
"""The tolerance relative to the number itself, as float64 rounds."""
SLICE_TOLERANCE = 1e-10
"""The tolerance relative to the largest number in its slice, for sums that cancel."""


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    excess: float  # the largest ratio of a difference to the tolerance
    case: str
    cases: int

    @property
    def holds(self) -> bool:
        """Whether the rewrite is equal in every case."""
        return self.excess <= 1.0


def compare(
    before: ReferenceEvaluator,
    after: ReferenceEvaluator,
    inputs: Iterable[ir.Value],
    probed: ProbedGraph,
    # The lowest values of inputs at which the original keeps its digits.
    lowest: Mapping[ir.Value, float],
) -> Verdict:
    """Run original and rewrite on every case, and stop at the first difference.

    Raises:
        ProofError: if one does not run, or the original gives no finite numbers.
    """
    inputs = list(inputs)
    count = 0
    compared = False
    largest, where = 0.0, ""
    # One run of several with the same shapes is enough.
    runs = {tuple(a.shape for a in run.values()): run for run in (*probed.runs, *probed.edge_runs)}
    for run in runs.values():
        for case, feeds in input_cases(inputs, run, probed):
            for value, floor in lowest.items():
                if str(value.name) in feeds:
                    feeds[str(value.name)] = np.maximum(feeds[str(value.name)], floor)
            count += 1
            try:
                expected, got = run_once(before, feeds), run_once(after, feeds)
            except Exception as error:  # the evaluator of onnx, on any graph
                raise ProofError(f"it cannot be run in float64 ({error})") from error
            if expected.shape != got.shape:
                return Verdict(np.inf, f"{case}, shape {got.shape}", count)
            finite = np.isfinite(expected)
            compared |= bool(finite.mean() > 0.5) if finite.size else False
            excess = excess_of(expected, got, finite)
            if excess >= largest:
                largest, where = excess, case
            if excess > 1.0:
                return Verdict(excess, case, count)
    if not compared:
        raise ProofError("it gives no finite numbers to compare with")
    return Verdict(largest, where, count)


def excess_of(
    expected: NDArray[np.float64], got: NDArray[np.float64], finite: NDArray[np.bool_]
) -> float:
    """Return the largest ratio of a difference to the tolerance, where ``finite`` holds."""
    size = np.where(finite, np.abs(expected), 0.0)
    scale = np.full(size.shape, np.inf)
    for axis in range(size.ndim):
        others = tuple(a for a in range(size.ndim) if a != axis)
        scale = np.minimum(scale, size.max(axis=others, keepdims=True, initial=0.0))
    allowed = RELATIVE_TOLERANCE * size + SLICE_TOLERANCE * np.where(np.isfinite(scale), scale, 0.0)
    with np.errstate(all="ignore"):
        difference = np.where(finite, np.abs(expected - got), 0.0)
        ratio = np.where(difference == 0.0, 0.0, difference / allowed)
    return float(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf).max(initial=0.0))


def input_cases(
    inputs: Sequence[ir.Value], run: Arrays, probed: ProbedGraph
) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield the name of each case and its arrays by the names of the inputs."""
    names = list(NUMBERS)
    for index, case in enumerate(names):
        feeds: dict[str, Array] = {}
        for place, value in enumerate(inputs):
            array = run[str(value.name)]
            random = np.random.default_rng([index, place])
            if probed.is_float(value):
                feeds[str(value.name)] = NUMBERS[case](random, array.shape).astype(np.float64)
            elif index and _may_be_mask(value, array):
                feeds[str(value.name)] = _mask(random, array)
            else:
                feeds[str(value.name)] = array
        yield f"{case}, {_largest(run)}", feeds
    # One tensor at a time exceeds any clamp, while the others are ordinary.
    floats = [v for v in inputs if probed.is_float(v)]
    for loud in floats if len(floats) > 1 else ():
        feeds = {}
        for place, value in enumerate(inputs):
            array = run[str(value.name)]
            random = np.random.default_rng([99, place])
            if value is loud:
                feeds[str(value.name)] = 50.0 * random.standard_normal(array.shape)
            else:
                is_float = probed.is_float(value)
                feeds[str(value.name)] = random.standard_normal(array.shape) if is_float else array
        yield f"one tensor large, {_largest(run)}", feeds

    masks = [v for v in inputs if not probed.is_float(v) and _may_be_mask(v, run[str(v.name)])]
    for turn in range(_EXTREMES) if masks else ():
        feeds = {}
        for place, value in enumerate(inputs):
            array = run[str(value.name)]
            random = np.random.default_rng([100 + turn, place])
            is_float = probed.is_float(value)
            other = random.standard_normal(array.shape) if is_float else array
            feeds[str(value.name)] = _extreme_mask(array, turn) if value in masks else other
        yield f"masks of no token, one or all, {_largest(run)}", feeds


def _may_be_mask(value: ir.Value, array: Array) -> bool:
    """Return whether an input is a mask; ones may be one of integers, in which 1 counts."""
    return depends_on_inputs(value) and (array.dtype.kind == "b" or bool((array == 1).all()))


_EXTREMES = 4


def _extreme_mask(array: Array, turn: int) -> Array:
    """Return a mask whose documents in turn have no token, one, all, and all but one."""
    mask = np.zeros(array.shape, bool)
    for place, document in enumerate(mask if mask.ndim > 1 else mask.reshape(1, -1)):
        kind = (turn + place) % _EXTREMES
        middle = document.shape[-1] // 2
        document[...] = kind > 1
        document[..., middle : middle + 1] = kind in (1, 2)
    return mask.astype(array.dtype)


def _largest(run: Arrays) -> str:
    return "batch and tokens " + "x".join(str(n) for n in next(iter(run.values())).shape[:2])


def _mask(random: np.random.Generator, array: Array) -> Array:
    mask = random.random(array.shape) < 0.7
    mask.reshape(-1)[:1] = True
    return mask.astype(array.dtype)


def _dominating(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    numbers = random.standard_normal(shape)
    if numbers.size:
        numbers.reshape(-1)[:: max(numbers.size // 3, 1)] += 60.0
    return numbers


def _with_magnitudes_apart(
    random: np.random.Generator, shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return numbers that are many magnitudes apart along the first two axes."""
    numbers = random.standard_normal(shape)
    for axis, size in enumerate(shape[:2]):
        steps = 10.0 ** (-1.5 * np.arange(size))
        numbers = numbers * steps.reshape(-1, *[1] * (len(shape) - axis - 1))
    return 100.0 * numbers


NUMBERS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]] = {
    "ordinary": lambda random, shape: random.standard_normal(shape),
    "up to 50": lambda random, shape: random.uniform(-50.0, 50.0, shape),
    "one dominates": _dominating,
    "constant": lambda random, shape: np.full(shape, random.standard_normal()),
    "magnitudes apart": _with_magnitudes_apart,
    "tiny": lambda random, shape: 1e-4 * random.standard_normal(shape),
    # Features so small that an eps of 1e-20 exceeds the sum of their products.
    "vanishing": lambda random, shape: 1e-14 * random.standard_normal(shape),
    "up to 300": lambda random, shape: random.uniform(-300.0, 300.0, shape),
    "all below": lambda random, shape: random.uniform(-60.0, -40.0, shape),
}
"""The numbers of each case, by its name."""
