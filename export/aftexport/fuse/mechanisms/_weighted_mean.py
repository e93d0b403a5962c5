"""What the AFT mechanisms have in common: a mean of values, weighted channel by channel.

G[b,t,c] * sum_u exp(K[b,u,c] + w[t,u]) V[b,u,c] / sum_u exp(K[b,u,c] + w[t,u])
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.fuse.algebra import Atom, Exp, Function, Leaf, Over, Plus, Product, UpTo, free, one
from aftexport.fuse.axes import Axis, Dims, flat, flat_dims
from aftexport.fuse.elementwise import gate
from aftexport.fuse.measured import Arrays, Measured
from aftexport.fuse.pattern import (
    Factor,
    NearMissError,
    Operand,
    Subject,
    aligned,
    by_dependence,
    check_maxima,
    holds_infinity,
    leaves,
    logits_of,
    refuse_changed_denominator,
    refuse_clamped,
    same_size,
    sums,
    without,
)
from aftexport.fuse.proof import part_of, run_once, runner
from aftexport.fuse.reading import rests_on_inputs
from aftexport.fuse.tokens import packed


@dataclass(frozen=True)
class WeightedMean:
    """A mean over ``summed`` that is a row of the output for each of ``tokens``.

    Attributes:
        subject: the value that it is.
        keys: factors of the weights that do not depend on the query's position.
        biases: those that do, on nothing but the two positions.
        value: what is averaged.
        outer: what the mean is multiplied by.
        summed: axes of the keys' positions.
        tokens: axes of the queries'.
        batch: axes that are packed into the first dim.
        channels: axes that are packed into the last.
        causal: whether keys after the query's position are left out.
    """

    subject: Subject
    keys: Product
    biases: Product
    value: Product
    outer: Product
    summed: tuple[Axis, ...]
    tokens: tuple[Axis, ...]
    batch: tuple[Axis, ...]
    channels: tuple[Axis, ...]
    causal: bool

    def groups(self, positions: tuple[Axis, ...]) -> Dims:
        """Dims of ``[B, T, D]``."""
        return (self.batch, positions, self.channels)

    @property
    def key_operand(self) -> Operand:
        """The keys: the logarithm of their weights, which may be one for channels of a head."""
        exponentials = Product(tuple(f for f in self.keys.factors if isinstance(f[0], Exp)))
        weights = without(self.keys, exponentials)
        logits = logits_of(exponentials)
        floored = holds_infinity(logits, self.subject.measured)
        own = tuple(axis for axis in self.channels if axis in free(self.keys))
        return Operand(logits, (self.batch, self.summed, own), weights, floored)

    @property
    def value_operand(self) -> Operand:
        """The values."""
        return Operand(self.value, self.groups(self.summed))

    @property
    def gating(self) -> tuple[str, Operand] | None:
        """The gate and its query; ``none`` where there is nothing outside the mean."""
        factors = self.outer.factors
        if not factors:
            return "none", Operand(self.value, self.groups(self.summed))
        found = gate(self.subject, list(factors))
        return (found[0], Operand(found[1], self.groups(self.tokens))) if found else None


def weighted_mean(subject: Subject) -> WeightedMean | None:
    """Takes the formula of a subject apart; raises NearMissError."""
    formula = subject.formula
    numerators = sums(formula.factors, 1.0)
    if len(numerators) != 1:
        return None
    (numerator,) = numerators
    summed = flat(numerator.axes)
    if not any(isinstance(atom, Exp) and p > 0 for atom, p in numerator.body.factors):
        return None
    denominators = sums(formula.factors, -1.0)
    if not denominators:
        refuse_changed_denominator(formula.factors)
        for inner in sums(numerator.body.factors, -1.0):
            if any(isinstance(atom, Exp) for atom, _ in inner.body.factors):
                raise NearMissError("the softmax is over another axis than the sum of the values")
        return None
    if len(denominators) != 1:
        return None
    found = aligned(denominators[0], numerator.body, summed)
    if found is None or found[1] != set(summed):
        raise NearMissError("numerator and denominator have different weights")
    weights = found[0]
    value = without(numerator.body, weights)
    if not set(summed) <= free(value):
        return None
    return _with_roles(subject, denominators[0], weights, value, summed)


def _with_roles(
    subject: Subject, denominator: Over, weights: Product, value: Product, summed: tuple[Axis, ...]
) -> WeightedMean | None:
    formula = subject.formula
    tokens = tuple(axis for axis in subject.axes if axis not in free(value))
    biases, keys = by_dependence(weights, set(tokens))
    reach = [atom for atom, _ in biases.factors if isinstance(atom, UpTo)]
    biases = Product(tuple(f for f in biases.factors if not isinstance(f[0], UpTo)))
    if not keys.factors or free(keys) != free(value):
        return None  # attention of another kind: its weights are not of each key channel
    if any(sums(_argument(f).factors, 1.0) for f in weights.factors):
        return None  # logits that are products of queries and keys
    if not tokens:
        return None  # pooling: one row for all tokens
    refuse_clamped(keys)
    refuse_clamped(biases)
    strange = free(biases) - {*summed, *tokens}
    if strange:
        raise NearMissError("the position bias depends on more than two positions")
    if not same_size(tokens, summed):
        raise NearMissError("queries and keys are of different sequences")
    check_maxima(subject, [denominator])
    outer = tuple(
        (atom, p)
        for atom, p in formula.factors
        if not (isinstance(atom, Over) and p in (1.0, -1.0))
    )
    others = [axis for axis in subject.axes if axis not in tokens]
    batch, channels = packed(subject, others)
    if not np.isclose(formula.coefficient * np.exp(formula.exponent), 1.0, rtol=1e-12):
        raise NearMissError("the mean is scaled, as where it is divided by the number of tokens")
    return WeightedMean(
        subject,
        keys,
        biases,
        value,
        Product(outer),
        summed,
        tokens,
        batch,
        channels,
        bool(reach),
    )


def _argument(factor: Factor) -> Product:
    atom = factor[0]
    return atom.argument if isinstance(atom, Exp) else one(atom)


def constant_bias(mean: WeightedMean) -> NDArray[np.float64] | None:
    """The biases as a constant ``[Tmax, Tmax]``, None where the graph computes them from others.

    A graph for any length cuts a corner out of a larger constant; the constant is what is given.
    """
    if len(mean.tokens) != 1 or len(mean.summed) != 1:
        return None
    order, measured = (mean.tokens[0], mean.summed[0]), mean.subject.measured
    # A mask that is made for each length is as long as what it is laid over.
    sizes: dict[int, int] = {}
    for value in leaves(mean.biases):
        sizes |= _sizes(value, measured)
    full = evaluated(mean.biases, order, measured, sizes)
    if full is None or full.ndim != 2 or full.shape[0] != full.shape[1]:
        return None
    with np.errstate(divide="ignore"):
        return np.log(full)


def evaluated(
    product: Product,
    order: tuple[Axis, ...],
    measured: Measured,
    sizes: Mapping[int, int] = MappingProxyType({}),
) -> NDArray[np.float64] | None:
    """A formula of constants as an array whose dims are ``order``, of size 1 where it lacks one.

    Args:
        product: the formula.
        order: its axes.
        measured: the graph's values.
        sizes: see ``whole``.
    """
    result = np.array(product.coefficient * np.exp(product.exponent))
    for atom, power in product.factors:
        given = _atom(atom, order, measured, sizes)
        if given is None:
            return None
        try:
            result = result * given**power
        except ValueError:  # corners of constants of different sizes
            return None
    return result


def _atom(
    atom: Atom, order: tuple[Axis, ...], measured: Measured, sizes: Mapping[int, int]
) -> NDArray[np.float64] | None:
    if isinstance(atom, Exp):
        inner = evaluated(atom.argument, order, measured, sizes)
        return None if inner is None else np.exp(inner)
    if isinstance(atom, Leaf | Function | Plus) and atom.value is not None:
        held = _laid_out(whole(atom.value, measured, sizes), atom.dims, order)
        if held is not None:
            return held
    if isinstance(atom, Plus):
        terms = [evaluated(term, order, measured, sizes) for term in atom.terms]
        return None if any(t is None for t in terms) else np.asarray(sum(terms))  # type: ignore[arg-type]
    return None


def _laid_out(
    array: NDArray[np.generic] | None, dims: Dims, order: tuple[Axis, ...]
) -> NDArray[np.float64] | None:
    dims = flat_dims(dims)
    if array is None:
        return None
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


def whole(
    value: ir.Value, measured: Measured, sizes: Mapping[int, int] = MappingProxyType({})
) -> NDArray[np.generic] | None:
    """A constant, or what a corner is cut out of for the length of the document, in float64.

    Args:
        value: of the graph.
        measured: the graph's values.
        sizes: see ``_sizes``; beside those of the constants that it is made of itself.
    """
    array = measured.constant(value)
    if array is not None or rests_on_inputs(value):
        return array
    part = part_of(value, (), measured)
    evaluator = runner(part, measured.opset)

    def at(run: Arrays | None) -> NDArray[np.generic] | None:
        if run is None:
            return None
        try:
            return run_once(evaluator, {str(v.name): run[str(v.name)] for v in part.inputs})
        except Exception:  # an evaluator of others: not every node runs at every size
            return None

    if not part.inputs:
        return at({})
    corners = [at(run) for run in (*measured.runs, *measured.more)]
    sizes = {**sizes, **_sizes(value, measured)}
    if max(sizes, default=0) ** 2 > max(_MOST, *sizes.values()):
        return None
    # The largest first: what is cut out for fewer is a corner of it as well.
    for tokens in sorted(sizes, reverse=True):
        for shape in (lambda n: (1, n), lambda n: (n, 1)):
            array, longer = (
                at(measured.alone(part.inputs, *shape(n))) for n in (tokens, tokens + 1)
            )
            if (
                array is not None
                and tokens == max(array.shape, default=0)
                # Where it grows on, there is no document that has all of it.
                and (longer is None or longer.shape == array.shape)
                and all(c is not None and _is_corner(c, array) for c in corners)
            ):
                return array
    return None


_MOST = 2**26
"""Entries of a bias that factors are multiplied out to: of 8,192 tokens, 256 MiB in the file."""


def _is_corner(corner: NDArray[np.generic], array: NDArray[np.generic]) -> bool:
    same = array[tuple(map(slice, corner.shape))]
    return same.shape == corner.shape and np.allclose(same, corner, rtol=1e-9, atol=1e-12)


def _sizes(value: ir.Value, measured: Measured) -> dict[int, int]:
    """The sizes that the dims of constants below a value have, each with how many entries."""
    found: dict[int, int] = {}
    seen, left = set[ir.Value](), [value]
    while left:
        below = left.pop()
        if below in seen:
            continue
        seen.add(below)
        array, node = measured.constant(below), below.producer()
        if array is not None:
            for n in array.shape:
                found[n] = max(array.size, found.get(n, 0))
        elif node is not None and node.op_type not in ("Shape", "Size"):  # of anything's
            left.extend(given for given in node.inputs if given is not None)
    return {n: size for n, size in found.items() if n > 1}
