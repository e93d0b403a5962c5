"""Which function of one tensor a factor is, however it is written: told by running it."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.equivalence import part_of, run_once, runner
from aftexport.recognition.formula.terms import Indicator, Leaf, Product
from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.patterns.pattern import Factor, Subject

Elementwise = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def classified(
    subject: Subject,
    factor: Factor,
    functions: Mapping[str, Elementwise],
) -> tuple[str, Product] | None:
    """Which of some functions of one tensor a factor is, however it is written, and of what.

    The nodes it comes from are run on numbers that tell the functions apart.
    """
    atom, exponent = factor
    value, dims = getattr(atom, "value", None), getattr(atom, "dims", ())
    if value is None or isinstance(atom, Leaf | Indicator):
        return None
    shape = subject.probed.runs[0][str(value.name)].shape
    for argument in _upstream(value, shape, subject.probed):
        try:
            part = part_of(value, [argument], subject.probed, max_nodes=_MAX_NODES)
            if list(part.inputs) != [argument]:
                continue
            found = run_once(runner(part, subject.opset), {str(argument.name): _GRID})
        except Exception:  # an evaluator of others: not every node runs on a vector of numbers
            continue
        with np.errstate(all="ignore"):
            found = found**exponent
        for name, function in functions.items():
            with np.errstate(all="ignore"):
                expected = function(_GRID)
            if found.shape == _GRID.shape and np.allclose(found, expected, rtol=1e-6, atol=1e-12):
                return name, subject.reader.read(argument, dims)
    return None


_MAX_NODES = 256
"""Of a function of one tensor; more are a graph that has other inputs."""
_GRID = np.array([-700, -88, -50, -10, -3, -1, -0.5, -1e-3, 0, 1e-3, 0.5, 1, 3, 10, 20, 50, 700.0])


def _upstream(value: ir.Value, shape: tuple[int, ...], probed: ProbedGraph) -> list[ir.Value]:
    """What a value is computed from entry by entry, the farthest first."""
    found: dict[ir.Value, None] = {}

    def walk(of: ir.Value, depth: int) -> None:
        node = of.producer()
        if node is None or depth > 8:
            return
        for given in node.inputs:
            if given is None or given in found or not probed.is_float(given):
                continue
            array = probed.runs[0].get(str(given.name))
            if array is not None and array.shape == shape:
                walk(given, depth + 1)
                found[given] = None

    walk(value, 0)
    return list(found)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-x))."""
    result: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-x))
    return result


GATES: dict[str, Elementwise] = {"sigmoid": sigmoid, "tanh": np.tanh}


def gate(subject: Subject, factors: Sequence[Factor]) -> tuple[str, Product] | None:
    """The gate that factors are, and its query; None where they are no gate."""
    return classified(subject, factors[0], GATES) if len(factors) == 1 else None
