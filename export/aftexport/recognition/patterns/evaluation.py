"""Formulas that are evaluated: constants as arrays, and elementwise functions by running them.

A graph may cut a corner out of a constant for the tokens of each document. The whole constant is
then used.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.comparison import ProofError, part_of, run_once, runner
from aftexport.recognition.graph.shape_probe import Arrays, ProbedGraph, depends_on_inputs
from aftexport.recognition.patterns.pattern import Factor, Subject, leaves
from aftexport.recognition.terms import (
    Atom,
    Axis,
    Dims,
    Exp,
    Function,
    Indicator,
    Leaf,
    Plus,
    Product,
    Unreadable,
    flat_dims,
)

Elementwise = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def classified(
    subject: Subject, factor: Factor, functions: Mapping[str, Elementwise]
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


Sizes = Mapping[int, int]
"""The sizes of dims of constants, each with the entries of the largest constant that has it."""

_MAX_BIAS_ENTRIES = 2**26
"""The most entries of a product of constants: a bias of 8,192 tokens, 256 MiB in the file."""


def evaluated(
    product: Product, order: tuple[Axis, ...], probed: ProbedGraph
) -> NDArray[np.float64] | None:
    """Return a formula of constants as an array, None if it depends on inputs.

    ``order`` gives the dims of the array, of size 1 for an axis that the formula lacks.
    """
    below = leaves(product)
    if any(map(depends_on_inputs, below)):
        return None
    return _evaluated(product, order, probed, _sizes(below, probed))


def whole(value: ir.Value, probed: ProbedGraph) -> NDArray[np.generic] | None:
    """Return a constant, or the constant of which a corner is cut out for each length."""
    return _whole(value, probed, {} if depends_on_inputs(value) else _sizes([value], probed))


def _evaluated(
    product: Product, order: tuple[Axis, ...], probed: ProbedGraph, sizes: Sizes
) -> NDArray[np.float64] | None:
    result = np.array(product.coefficient * np.exp(product.exponent))
    for atom, power in product.factors:
        array = _atom(atom, order, probed, sizes)
        if array is None:
            return None
        if not can_broadcast(result, array):
            return None  # corners of constants of different sizes
        result = result * array**power
    return result


def can_broadcast(*arrays: NDArray[np.float64]) -> bool:
    """Return whether arrays can be added and multiplied: dims are equal, from the last, or 1."""
    shapes = (reversed(array.shape) for array in arrays)
    return all(len({*sizes} - {1}) <= 1 for sizes in itertools.zip_longest(*shapes, fillvalue=1))


def _atom(
    atom: Atom, order: tuple[Axis, ...], probed: ProbedGraph, sizes: Sizes
) -> NDArray[np.float64] | None:
    if isinstance(atom, Exp):
        inner = _evaluated(atom.argument, order, probed, sizes)
        return None if inner is None else np.exp(inner)
    if isinstance(atom, Indicator):
        held = _laid_out(_whole(atom.value, probed, sizes), atom.dims, order)
        return held if held is None or atom.holds else 1.0 - held
    if isinstance(atom, Leaf | Function | Plus) and atom.value is not None:
        held = _laid_out(_whole(atom.value, probed, sizes), atom.dims, order)
        if held is not None:
            return held
    if isinstance(atom, Plus):
        terms = [_evaluated(term, order, probed, sizes) for term in atom.terms]
        known = [term for term in terms if term is not None]
        if len(known) < len(terms):
            return None
        if not can_broadcast(*known):
            raise Unreadable("constants of different sizes are added")
        return np.asarray(sum(known))
    return None


def _laid_out(
    array: NDArray[np.generic] | None, dims: Dims, order: tuple[Axis, ...]
) -> NDArray[np.float64] | None:
    dims = flat_dims(dims)
    if array is None:
        return None
    if array.ndim != len(dims):
        raise Unreadable("a constant has more or fewer dims than its formula")
    sizes: dict[Axis, int] = {}
    for n, axes in zip(array.shape, dims, strict=True):
        # A corner of a constant may be cut out of a larger one: its own size counts.
        sizes |= {axes[0]: n} if len(axes) == 1 else {axis: axis.sizes[0] for axis in axes}
    own = list(sizes)
    if set(own) - set(order) or array.size != np.prod([*sizes.values()], dtype=np.int64):
        return None
    array = array.astype(np.float64).reshape([sizes[axis] for axis in own])
    array = array.transpose([own.index(axis) for axis in order if axis in own])
    return array.reshape([sizes.get(axis, 1) for axis in order])


def _whole(value: ir.Value, probed: ProbedGraph, sizes: Sizes) -> NDArray[np.generic] | None:
    """Return a whole constant; a mask for each length has one of ``sizes`` as its length."""
    array = probed.constant(value)
    if array is not None or depends_on_inputs(value):
        return array
    part = part_of(value, (), probed)
    try:
        evaluator = runner(part, probed.opset)
    except ProofError as error:
        raise Unreadable(str(error)) from error

    def at(run: Arrays | None) -> NDArray[np.generic] | None:
        if run is None:
            return None
        try:
            return run_once(evaluator, {str(v.name): run[str(v.name)] for v in part.inputs})
        except Exception:  # the evaluator of onnx, which fails at some sizes
            return None

    if not part.inputs:
        return at({})
    corners = [at(run) for run in (*probed.runs, *probed.edge_runs)]
    if max(sizes, default=0) ** 2 > max((_MAX_BIAS_ENTRIES, *sizes.values())):
        return None
    # The largest first, since a constant for fewer tokens is a corner of it.
    for tokens in sorted(sizes, reverse=True):
        for shape in (lambda n: (1, n), lambda n: (n, 1)):
            array = at(probed.run_at(part.inputs, *shape(tokens)))
            if (
                array is None
                or tokens != max(array.shape, default=0)
                or not all(c is not None and _is_corner(c, array) for c in corners)
            ):
                continue
            longer = at(probed.run_at(part.inputs, *shape(tokens + 1)))
            # A constant that keeps growing has no largest length.
            if longer is None or longer.shape == array.shape:
                return array
    return None


def _is_corner(corner: NDArray[np.generic], array: NDArray[np.generic]) -> bool:
    if array.ndim != corner.ndim:
        return False
    same = array[tuple(map(slice, corner.shape))]
    return same.shape == corner.shape and np.allclose(same, corner, rtol=1e-9, atol=1e-12)


def _sizes(values: Iterable[ir.Value], probed: ProbedGraph) -> Sizes:
    """Return the sizes of the constants that values are computed from."""
    largest: dict[int, int] = {}
    seen, left = set[ir.Value](), list(values)
    while left:
        below = left.pop()
        if below in seen:
            continue
        seen.add(below)
        array, node = probed.constant(below), below.producer()
        if array is not None:
            for n in array.shape:
                largest[n] = max(array.size, largest.get(n, 0))
        elif node is not None and node.op_type not in ("Shape", "Size"):  # sizes of any tensor
            left.extend(source for source in node.inputs if source is not None)
    return {n: size for n, size in largest.items() if n > 1}
