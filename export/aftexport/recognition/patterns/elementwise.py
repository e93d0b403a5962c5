"""Elementwise functions of one tensor, classified by running them."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.formula.terms import Indicator, Leaf, Product
from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.patterns.pattern import Factor, Subject
from aftexport.recognition.proof.part import part_of, run_once, runner

Elementwise = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def classified(
    subject: Subject,
    factor: Factor,
    functions: Mapping[str, Elementwise],
) -> tuple[str, Product] | None:
    """Return the name and the argument of the elementwise function that a factor is.

    The nodes that compute the factor are run on numbers that distinguish the functions.
    The result is None for any other function.
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
            values = run_once(runner(part, subject.opset), {str(argument.name): _GRID})
        except Exception:  # the evaluator of onnx, which fails on some vectors
            continue
        with np.errstate(all="ignore"):
            values = values**exponent
        for name, function in functions.items():
            with np.errstate(all="ignore"):
                expected = function(_GRID)
            if values.shape == _GRID.shape and np.allclose(values, expected, rtol=1e-6, atol=1e-12):
                return name, subject.reader.read(argument, dims)
    return None


_MAX_NODES = 256
"""The most nodes of a function of one tensor; a part with more has other inputs."""
_GRID = np.array([-700, -88, -50, -10, -3, -1, -0.5, -1e-3, 0, 1e-3, 0.5, 1, 3, 10, 20, 50, 700.0])


def _upstream(value: ir.Value, shape: tuple[int, ...], probed: ProbedGraph) -> list[ir.Value]:
    """Return the tensors of one shape that a value is computed from, the farthest first."""
    sources: dict[ir.Value, None] = {}

    def walk(of: ir.Value, depth: int) -> None:
        node = of.producer()
        if node is None or depth > 8:
            return
        for source in node.inputs:
            if source is None or source in sources or not probed.is_float(source):
                continue
            array = probed.runs[0].get(str(source.name))
            if array is not None and array.shape == shape:
                walk(source, depth + 1)
                sources[source] = None

    walk(value, 0)
    return list(sources)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(-x))."""
    result: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-x))
    return result


GATES: dict[str, Elementwise] = {
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
}


NO_GATE = "the factor of the mean is neither sigmoid, tanh nor relu of one tensor"
"""The reason why the factor of a mean is not a gate."""


def gate(subject: Subject, factors: Sequence[Factor]) -> tuple[str, Product] | None:
    """Return the gate that factors are and its query, None if they are not a gate."""
    return classified(subject, factors[0], GATES) if len(factors) == 1 else None
