"""Adversarial inputs of a part of a graph."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.graph.shape_probe import Arrays, ProbedGraph, depends_on_inputs
from aftexport.recognition.proof.part import Array


def input_cases(
    inputs: Sequence[ir.Value], run: Arrays, probed: ProbedGraph
) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield the name of each case and its arrays by the names of the inputs.

    Args:
        inputs: the inputs of a part.
        run: a run of the graph, with the shape of each input and the integers.
        probed: the probed values.
    """
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
