"""The comparison of every intermediate tensor with PyTorch, and the cause of the first large error.

The cause is the kernel, the precision or the export. The operator in question runs again, isolated,
on the inputs with which it was served:

    served   as it was served
    body     its portable body, in the precision of the graph
    wide     the body in float64
    defined  the operator's definition in float64, with the weights in the graph
    rounded  PyTorch's own computation in float64, with weights rounded to the graph's type
    exact    the same with the weights as they were trained

Each run differs from the next in exactly one property, so the largest step gives the cause.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.bundle.golden import Array, Case
from aftexport.engines.cast_graph import has_bfloat16, widen
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, Provider, operator_paths
from aftexport.operators.domain import DOMAIN
from aftexport.parity.comparison import Differences
from aftexport.parity.report import Blame, Layer, Layers
from aftexport.system.console import path_title
from aftexport.system.onnx_files import MODEL, read_model, write_model
from aftexport.verify.subgraph import Subgraph
from aftexport.verify.torch_program import Program, Span


def compare_layers(
    path: Path,
    program: Program,
    case: Case,
    *,
    bound: float,
    fused: bool = True,
    provider: Provider = "cpu",
    # whether an output is outside tolerance, so that a smaller error has a cause to be found too
    is_outside: bool = False,
) -> Layers:
    """Compare every tensor of the served graph that PyTorch computes too."""
    model = read_model(path)
    if has_bfloat16(model):
        widen(model)  # ONNX Runtime runs bfloat16 graphs in float32
    names = [name for node in model.graph.node for name in node.output if name in program]
    expected = program.run(names, case.inputs)
    probe = _Probe(model, case.inputs, fused=fused, provider=provider)
    observed, altered = probe.observe([name for name in names if name in expected])
    counting = {name: program.counting(name, case.inputs) for name in observed}
    paths = operator_paths(path, provider=provider) if fused else {}
    producers = {name: node for node in model.graph.node for name in node.output}
    layers = []
    for name, value in observed.items():
        node = producers[name]
        error = Differences.between(value, expected[name], counting[name]).error
        way = "standard operator"
        if node.domain == DOMAIN:
            way = path_title(paths.get(node.op_type, "portable"))
        layers.append(
            Layer(name, program.module(name), node.op_type, way, error, not error <= bound)
        )
    first = next((layer for layer in layers if layer.outside), None)
    if first is None and is_outside:
        largest = max(layers, key=lambda layer: layer.error)
        first = largest if largest.error > bound / _ROUNDING else None
    blame = None
    if first is not None:
        blame = find_blame(
            model,
            program,
            {**case.inputs, **observed},
            first.tensor,
            path={layer.tensor: layer.path for layer in layers},
            counting=counting,
            bound=bound,
            provider=provider,
        )
    unmatched = [
        name
        for node in model.graph.node
        for name in node.output
        if name not in program and not name.startswith("val_")
    ]
    return Layers(case.name, bound, layers, altered, unmatched, blame)


_ROUNDING = 50
"""A correct operator has an error below the bound by this factor."""
_ALIKE = 10
"""Errors that differ by less than this factor have one cause."""


class _Probe:
    """An observer of the tensors inside a graph that runs as it is served."""

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Mapping[str, Array],
        *,
        fused: bool,
        provider: Provider,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._fused = fused
        self._provider: Provider = provider
        self._served = self._run([])

    def observe(self, names: Sequence[str]) -> tuple[dict[str, Array], list[str]]:
        """Return the tensors of these names in order, and the tensors that change the fusion.

        An output cannot be fused away. If marking tensors as outputs changes the result, the
        tensors are halved repeatedly until single tensors are left.
        """
        seen, altered = dict[str, Array](), list[str]()
        left = [[name for name in names if name not in self._served]]
        while left:
            marked = left.pop()
            tensors = self._run(marked)
            is_same = all(
                np.array_equal(tensors.pop(name), output, equal_nan=True)
                for name, output in self._served.items()
            )
            if is_same or len(marked) == 1:
                seen |= tensors
                altered += [] if is_same else marked
            else:
                half = len(marked) // 2
                left += [marked[half:], marked[:half]]
        seen |= self._served
        return {name: seen[name] for name in names}, altered

    def _run(self, marked: Sequence[str]) -> dict[str, Array]:
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in marked)
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), model)
            engine = OnnxRuntimeEngine(
                Path(folder) / MODEL, fused=self._fused, provider=self._provider
            )
            return engine.run(self._inputs)


_FAR = 10
"""Maximum difference of a correct kernel from the body, in multiples of the body's rounding."""


@dataclass(frozen=True)
class Steps:
    """Errors between runs of one operator that differ in one thing each."""

    served_again: float  # tensor as it was observed, and the same run once more
    kernel: float  # fused kernel in float32, and the portable body
    kernel_precision: float  # fused kernel as served, and in float32
    body_precision: float  # portable body in the types of the graph, and in float64
    body: float  # body in float64, and the operator's definition
    definition: float  # definition, and PyTorch with the weights of the graph
    # PyTorch with the weights of the graph, and with those that were trained
    weight_precision: float
    # PyTorch in the types of the graph, and in float64; infinite if PyTorch lacks an operator for
    # them
    torch_in_same_types: float

    def to_dict(self) -> dict[str, float]:
        """Return the steps under the names that reports show."""
        return {
            "served again": self.served_again,
            "kernel": self.kernel,
            "precision of the kernel": self.kernel_precision,
            "precision of the body": self.body_precision,
            "body": self.body,
            "definition": self.definition,
            "precision of the weights": self.weight_precision,
            "PyTorch in the same types": self.torch_in_same_types,
        }


@dataclass(frozen=True)
class Verdict:
    """The cause of an error."""

    cause: str  # `export`, `precision` or `kernel`
    loses_digits: bool  # whether the formula in the file loses digits that its types would keep


Mask = NDArray[np.bool_] | None


def find_blame(
    model: onnx.ModelProto,
    program: Program,
    observed: Mapping[str, Array],
    end: str,
    *,
    path: Mapping[str, str],  # path of each tensor's operator, such as `fused kernel`
    counting: Mapping[str, Mask],  # mask of the compared numbers of each tensor; None for all
    bound: float,
    provider: Provider = "cpu",
) -> Blame:
    """Find the operator to blame for the error of the tensor ``end``, and the cause."""
    suspects = {name: _own_error(program, observed, name, counting[name]) for name in path}
    names = list(path)
    earlier = names[: names.index(end) + 1]
    # An error may be small at its origin and grow in later operators.
    origins = [name for name in earlier if name == end or _has_path(model, name, end)]
    tensor = max(reversed(origins), key=lambda name: suspects[name])
    if suspects[tensor] <= bound:  # several operators add up: name the first of them
        tensor = next(n for n in origins if suspects[n] >= suspects[tensor] / _ALIKE)
    known = {name: value for name, value in observed.items() if name != tensor}
    runs = _Runs(
        subgraph=Subgraph(model, tensor, known),
        program=program,
        known=known,
        tensor=tensor,
        counting=counting[tensor],
        fused=path[tensor] == "fused kernel",
        provider=provider,
    )
    span = program.span(tensor, known)
    served = runs.served()
    steps = runs.measure(observed[tensor], served)
    verdict = judge(steps, bound, fused=runs.fused)
    findings = runs.findings(steps, verdict, span)
    if verdict.cause == "precision" and (lost := _overflowed(served)):
        findings.append(
            f"It overflows: {lost} of its {served.size} numbers are beyond {served.dtype}."
        )
    if suspects[tensor] <= bound:
        findings.append("Isolated, it is within tolerance: later operators add to its error.")
    return Blame(
        tensor,
        span.modules,
        runs.subgraph.node.op_type,
        path[tensor],
        verdict.cause,
        suspects[tensor],
        steps.to_dict(),
        findings,
    )


@dataclass(frozen=True)
class _Runs:
    """The runs of one operator, each on the inputs with which it was served."""

    subgraph: Subgraph
    program: Program
    known: Mapping[str, Array]
    tensor: str
    counting: Mask
    fused: bool
    provider: Provider

    def served(self) -> Array:
        return self.subgraph.run(fused=self.fused, provider=self.provider)

    def rounded(self) -> Array:
        return self.program.run([self.tensor], self.known, exact=False)[self.tensor]

    def measure(self, observed: Array, served: Array) -> Steps:
        """Return the error between each run and the next."""
        plain = self.subgraph.in_float32() if self.fused else None
        narrowest = plain.run(fused=True, provider=self.provider) if plain else served
        body = self.subgraph.run(fused=False, provider=self.provider)
        wide, defined = self.subgraph.run_wide(), self.subgraph.run_defined()
        rounded, exact = self.rounded(), self.program.run([self.tensor], self.known)[self.tensor]
        own = _run_torch(self.program, self.tensor, self.known)
        return Steps(
            served_again=self.apart(observed, served),
            kernel=self.apart(narrowest, body) if self.fused else 0.0,
            kernel_precision=self.apart(served, narrowest) if self.fused else 0.0,
            body_precision=self.apart(body, wide),
            body=self.apart(wide, defined),
            definition=self.apart(defined, rounded),
            weight_precision=self.apart(rounded, exact),
            torch_in_same_types=np.inf if own is None else self.apart(own, rounded),
        )

    def findings(self, steps: Steps, verdict: Verdict, span: Span) -> list[str]:
        """Return sentences on a fault of the export; empty for other causes."""
        if verdict.cause != "export":
            return []
        if verdict.loses_digits:
            return [
                "The formula in the file loses digits: PyTorch computes it in the same types with "
                f"an error of {steps.torch_in_same_types:.1e}."
            ]
        findings = _weights(self.subgraph, self.program, span)
        findings = findings or _transposed(self.subgraph, self.rounded(), self.apart)
        if not self.fused and steps.body > steps.definition:
            findings.append("Its fallback in the file differs from the definition.")
        return findings or [
            "Its weights equal those of PyTorch: an activation, an axis, an attribute or an input "
            "differs."
        ]

    def apart(self, a: Array, b: Array) -> float:
        return _apart(a, b, self.counting)


def _run_torch(program: Program, tensor: str, known: Mapping[str, Array]) -> Array | None:
    try:
        return program.run_own(tensor, known)
    except RuntimeError:  # PyTorch lacks this operator for float16 on the CPU
        return None


def _own_error(program: Program, observed: Mapping[str, Array], name: str, counting: Mask) -> float:
    """Return the operator's own error against PyTorch, on the inputs with which it was served."""
    known = {other: value for other, value in observed.items() if other != name}
    with np.errstate(all="ignore"):
        exact = program.run([name], known)[name]
    if not np.isfinite(exact).all():
        return 0.0  # its inputs were already lost
    return Differences.between(observed[name], exact, counting).error


def _has_path(model: onnx.ModelProto, start: str, end: str) -> bool:
    reached = {start}
    for node in model.graph.node:
        if reached & set(node.input):
            reached |= set(node.output)
    return end in reached


def _apart(a: Array, b: Array, counting: Mask) -> float:
    """Return the error of ``a``; two numbers that are not finite count as equal."""
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if first.shape == second.shape:
        lost = ~np.isfinite(first) & ~np.isfinite(second)
        first, second = np.where(lost, 0, first), np.where(lost, 0, second)
    return Differences.between(first, second, counting).error


def _overflowed(array: Array) -> int:
    """Return the count of numbers that are not finite or at the limit of the type."""
    limits: Any = np.finfo(array.dtype)
    wide = np.abs(array.astype(np.float64))
    return int((~(wide < float(limits.max))).sum())


def _weights(subgraph: Subgraph, program: Program, span: Span) -> list[str]:
    """Return findings on PyTorch's parameters whose values in the graph differ."""
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in subgraph.model.graph.initializer}
    floats = {name: array for name, array in stored.items() if array.dtype.kind == "f"}
    findings = []
    for name in span.parameters:
        wanted = program.parameter(name)
        alike = {
            other: differing
            for other, array in floats.items()
            for differing in [_differing(array, wanted)]
            if differing is not None
        }
        if alike and min(alike.values())[0]:
            other = min(alike, key=lambda key: alike[key])
            count, largest = alike[other]
            findings.append(
                f"{name}: the graph's {other} differs in {count} of {wanted.size} numbers, "
                f"by {largest:.1e} at most."
            )
    return findings


def _differing(array: Array, wanted: Array) -> tuple[int, float] | None:
    """Return the count of different numbers and their largest difference.

    A matrix is compared as it is and transposed; the better match counts.
    """
    ways = [wanted.T, wanted] if wanted.ndim == 2 else [wanted.reshape(-1)]
    flat = array if wanted.ndim == 2 else array.reshape(-1)
    matches = []
    for way in ways:
        if way.shape == flat.shape:
            with np.errstate(all="ignore"):
                rounded = way.astype(flat.dtype)
                apart = np.abs(flat.astype(np.float64) - rounded.astype(np.float64))
            differs = flat != rounded
            matches.append((int(differs.sum()), float(apart[differs].max(initial=0))))
    return min(matches, default=None)


def _transposed(
    subgraph: Subgraph, rounded: Array, apart: Callable[[Array, Array], float]
) -> list[str]:
    """Return a finding on the square weight whose transposition removes the difference."""
    before = apart(subgraph.run_defined(), rounded)
    for tensor in subgraph.model.graph.initializer:
        if len(tensor.dims) == 2 and tensor.dims[0] == tensor.dims[1] > 1:
            turned = subgraph.transposed(tensor.name).run_defined()
            if apart(turned, rounded) < before / 100:
                return [f"{tensor.name} is transposed: the other way, the difference disappears."]
    return []


def judge(steps: Steps, bound: float, *, fused: bool) -> Verdict:
    """Name the cause of an error: the one with the largest step."""
    kernel = max(steps.kernel, steps.served_again)
    # Two correct kernels differ by their rounding. If numbers overflow, they may lose
    # different ones.
    rounding = max(steps.body_precision, steps.weight_precision)
    broken = fused and kernel > max(bound, _FAR * rounding)
    formula = _lost_by_formula(steps, bound)
    if formula:
        rounding = steps.weight_precision
    shares = {
        "export": max(steps.definition, 0.0 if fused else steps.body, formula),
        "precision": max(steps.kernel_precision, rounding, 0.0 if broken else kernel),
        "kernel": kernel if broken else 0.0,
    }
    cause = max(shares, key=lambda name: shares[name])
    return Verdict(cause, loses_digits=cause == "export" and formula == shares["export"])


def _lost_by_formula(steps: Steps, bound: float) -> float:
    """Return the error of the body if its types do not explain the error, else 0."""
    lost, own = steps.body_precision, steps.torch_in_same_types
    return lost if own <= min(bound, lost / _FAR) else 0.0
