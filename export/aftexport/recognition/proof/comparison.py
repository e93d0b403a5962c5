"""Comparison of two evaluators on adversarial inputs of a part of a graph."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from aftexport.recognition.graph.shape_probe import Arrays, ProbedGraph, depends_on_inputs
from aftexport.recognition.proof.part import Array, ProofError, run_once

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
            excess = _excess(expected, got, finite)
            if excess >= largest:
                largest, where = excess, case
            if excess > 1.0:
                return Verdict(excess, case, count)
    if not compared:
        raise ProofError("it gives no finite numbers to compare with")
    return Verdict(largest, where, count)


def _excess(
    expected: NDArray[np.float64], got: NDArray[np.float64], finite: NDArray[np.bool_]
) -> float:
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
    names = list(_NUMBERS)
    for index, case in enumerate(names):
        feeds: dict[str, Array] = {}
        for place, value in enumerate(inputs):
            array = run[str(value.name)]
            random = np.random.default_rng([index, place])
            if probed.is_float(value):
                feeds[str(value.name)] = _NUMBERS[case](random, array.shape).astype(np.float64)
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


_NUMBERS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]] = {
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
