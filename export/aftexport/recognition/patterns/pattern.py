"""Rewrites, subjects and conditions that the patterns of the mechanisms share."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition import algebra
from aftexport.recognition.algebra import free, key, multiply, substitute
from aftexport.recognition.graph.shape_probe import ProbedGraph, depends_on_inputs
from aftexport.recognition.read import layout
from aftexport.recognition.read.reader import Reader
from aftexport.recognition.terms import (
    ONE,
    Atom,
    Axis,
    Count,
    Dims,
    Exp,
    Function,
    Indicator,
    Leaf,
    Max,
    Plus,
    Product,
    Sum,
    as_product,
    flat,
    flat_dims,
    single_atom,
)

Factor = tuple[Atom, float]
LOWEST = -1e30
"""The highest bias that leaves any key out."""
OTHER_KEYS = "numerator and denominator are sums over different keys"
OTHER_WEIGHTS = "numerator and denominator have different weights"


class NearMissFound(Exception):  # noqa: N818, an outcome and not an error
    """The condition that a value fails, which is a mechanism but for that condition."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy  # a sentence for the author of the model, if there is one


DIVIDE_BY_SUM = (
    "Divide by the sum of the weights itself: once the maximum of the keys is subtracted, it "
    "cannot be 0."
)
"""The remedy for a number that keeps a sum of exponentials from 0."""


@dataclass(frozen=True)
class Operand:
    """A tensor input of an operator."""

    formula: Product
    groups: Dims
    weights: Product = ONE  # the factors whose logarithm is added to the formula
    floored: bool = False  # whether it may hold -inf, which the lowest finite logit then replaces
    beside: Sequence[Product] = ()  # the first channels of the additional head
    # Whether to repeat it along fixed axes of ``groups`` that the formula lacks.
    is_spread: bool = False
    # Further formulas with their dims, whose channels follow in each head.
    joined: Sequence[tuple[Product, Dims]] = ()


@dataclass(frozen=True)
class Division:
    """A division by the sum of the weights, which an operator without a normalizer leaves out."""

    normalizer: str  # ``add`` if ``eps`` is added to the sum, ``clamp`` if it is the minimum
    eps: float


@dataclass(frozen=True)
class Rewrite:
    """An operator that computes a value."""

    mechanism: str  # the stem of the mechanism's file
    op_type: str
    # All inputs except ``lengths``, in order; an array is a constant.
    operands: "Sequence[Operand | NDArray[np.float64]]"
    groups: Dims
    attributes: Mapping[str, int | float | str] = field(default_factory=dict)
    opened: Sequence[ir.Value] = ()  # the leaves whose producers are replaced too
    # Whether operands have an additional head, which the output loses again.
    extra_head: bool = False
    # Lowest values of tensors at which the original keeps its digits.
    lowest: Mapping[ir.Value, float] = field(default_factory=dict)
    outside: Product = ONE  # the product that multiplies the result of the operator
    note: str = ""  # the reason why nodes around the operator do a part of the mechanism
    has_key_lengths: bool = False  # whether the last input is the number of keys of each document
    # Division of the result, with a channel of ones beside the values of each head.
    division: Division | None = None
    # Whether the operator is a part of a mechanism, and the rest stays in the graph.
    is_part: bool = False


@dataclass(frozen=True)
class Subject:
    """A value of the graph that patterns are held against."""

    formula: Product
    dims: Dims
    reader: Reader
    probed: ProbedGraph
    opset: int

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes of the value, in order."""
        return tuple(axis for axes in flat_dims(self.dims) for axis in axes)


Pattern = Callable[[Subject], Rewrite | None]
"""A function that returns the rewrite of a subject, None for another formula.

It raises NearMissFound if only one condition of the mechanism fails.
"""


def is_condition(atom: Atom) -> bool:
    """Return whether an atom is a mask, or composed of masks by and, or, not."""
    if isinstance(atom, Indicator):
        return True
    if not isinstance(atom, Plus) or len(atom.terms) != 2:
        return False
    constants = [term.coefficient for term in atom.terms if not term.factors]
    left_out = [term for term in atom.terms if term.factors and term.coefficient == -1.0]
    return constants == [1.0] and len(left_out) == 1 and are_conditions(left_out[0])


def is_held(atom: object) -> TypeGuard[Leaf | Function | Plus]:
    """Return whether a tensor of the graph holds an atom."""
    return isinstance(atom, Leaf | Function | Plus) and atom.value is not None


def are_conditions(product: Product) -> bool:
    """Return whether a product has only masks as factors."""
    return all(is_condition(atom) for atom, _ in product.factors)


def zeroed(value: Product, keys: Product, reader: Reader) -> Product:
    """Return values that are 0 where keys are left out, if the weights of all keys may be 0.

    Otherwise weights that are all 0 are NaN in the graph, and equal in the operator.
    """
    conditions = tuple(f for f in keys.factors if is_condition(f[0]))
    return multiply(value, Product(conditions)) if reader.fills_weights else value


def sums(factors: Iterable[Factor], power: float) -> list[Sum]:
    """Return the sums over axes that occur with a power."""
    return [atom for atom, p in factors if isinstance(atom, Sum) and p == power]


def within(part: Product, whole: Product) -> bool:
    """Return whether every factor of ``part`` is one of ``whole``, to the same power."""
    names = {key(Product((f,))) for f in whole.factors}
    return all(key(Product((f,))) in names for f in part.factors)


def without(whole: Product, part: Product) -> Product:
    """Return ``whole`` without the factors of ``part``."""
    names = {key(Product((f,))) for f in part.factors}
    factors = tuple(f for f in whole.factors if key(Product((f,))) not in names)
    return Product(factors, whole.coefficient, whole.exponent)


def renamings(of: Sequence[Axis], to: Sequence[Axis]) -> Iterator[dict[Axis, Axis]]:
    """Yield every renaming of the axes ``of`` to axes in ``to`` of the same sizes."""
    for chosen in itertools.permutations(to, len(of)):
        if all(a.sizes == b.sizes for a, b in zip(of, chosen, strict=True)):
            yield dict(zip(of, chosen, strict=True))


def aligned(total: Sum, body: Product, bound: Sequence[Axis]) -> tuple[Product, set[Axis]] | None:
    """Return the summand of ``total`` as factors of ``body``, and the axes of ``bound`` it sums."""
    for names in renamings(flat(total.axes), flat(bound)):
        part = substitute(total.body, names)
        if within(part, body):
            return part, set(names.values())
    return None


def fixed_sum(product: Product) -> tuple[Sum, float, float] | None:
    """Return the sum, the constant and the scale of ``scale * (sum + constant)``, else None."""
    if len(product.factors) != 1 or product.factors[0][1] != 1.0:
        return None
    atom = product.factors[0][0]
    if isinstance(atom, Sum):
        return atom, 0.0, 1.0
    if not isinstance(atom, Plus) or len(atom.terms) != 2:
        return None
    constants = [t for t in atom.terms if not t.factors]
    totals = [t for t in atom.terms if len(t.factors) == 1 and isinstance(t.factors[0][0], Sum)]
    if len(constants) != 1 or len(totals) != 1 or totals[0].factors[0][1] != 1.0:
        return None
    total = totals[0].factors[0][0]
    assert isinstance(total, Sum)
    by = totals[0].coefficient
    return total, constants[0].coefficient / by, by


def refuse_changed_denominator(factors: Iterable[Factor], remedy: str = "") -> None:
    """Raise NearMissFound if terms are added to a denominator, or a function is applied to it."""
    for atom, p in factors:
        if p != -1.0:
            continue
        if isinstance(atom, Plus) and any(sums(t.factors, 1.0) for t in atom.terms):
            raise NearMissFound(_addition(atom), remedy)
        for term in atom.terms if isinstance(atom, Plus) else (as_product(atom),):
            inner = single_atom(term)
            if isinstance(inner, Function) and any(map(_adds_sums, inner.arguments)):
                raise NearMissFound(f"the denominator goes through {inner.name}", remedy)


def _addition(denominator: Plus) -> str:
    """Return the reason why terms that are added to a sum of weights prevent a rewrite."""
    total = next(t for t in denominator.terms if sums(t.factors, 1.0))
    others = [a for a, _ in total.factors if not isinstance(a, Sum)]
    constants = [t.coefficient for t in denominator.terms if not t.factors]
    (added, *_) = [f"{c:.3g}" for c in constants] or ["a term"]
    if constants and others:
        if all(isinstance(other, Count) for other in others):
            return (
                f"{added} is added to a mean of the weights, so {added} times the number of tokens"
                " is added to their sum"
            )
        return f"{added} is added once the sum of the weights is multiplied or divided by a tensor"
    for term in denominator.terms:
        if term.factors and all(isinstance(a, Count) for a, _ in term.factors):
            added = f"{term.coefficient:.3g} times the number of tokens"
    return f"{added} is added to the denominator"


def _adds_sums(product: Product) -> bool:
    """Return whether a product has a sum over tokens, or adds one to other terms."""
    terms = [t for a, _ in product.factors if isinstance(a, Plus) for t in a.terms]
    return any(sums(term.factors, 1.0) for term in (product, *terms))


def refuse_input_weights(weights: Product) -> None:
    """Raise NearMissFound if an input of numbers multiplies the weights of keys."""
    for atom, _ in weights.factors:
        if (
            isinstance(atom, Leaf)
            and atom.value.producer() is None
            and depends_on_inputs(atom.value)
        ):
            raise NearMissFound(
                f"the weights of keys are multiplied by the input {atom.value.name}, which may be"
                " any number: make it one of true and false, if it is a mask"
            )


def refuse_clamped(weights: Product, name: str = "the keys") -> None:
    """Raise NearMissFound if the logits are a clamp, or have a maximum subtracted from them.

    A clamp or a maximum within the logits, as in a norm of the keys, is a part of the tensor.
    """
    arguments = [atom.argument for atom, _ in weights.factors if isinstance(atom, Exp)]
    for inner in map(single_atom, arguments):
        if isinstance(inner, Max):
            raise NearMissFound("a maximum is subtracted that is over other axes than the tokens")
        is_clamp = isinstance(inner, Function) and inner.name.startswith(("Clip", "Max", "Min"))
        if is_clamp and len(arguments) == 1:
            raise NearMissFound(f"{name} are clamped before the exponential")


def check_maxima(subject: Subject, denominators: Iterable[Sum]) -> None:
    """Raise NearMissFound for a maximum over other axes than a denominator sums.

    It may cancel in exact arithmetic, but other exponentials underflow. One that is still in the
    formula, as in a norm of the values, does not cancel.
    """
    left = [*map(_signature, _maxima_within(subject.formula))]
    for maximum in subject.reader.maxima:
        if _signature(maximum) in left:
            continue
        axes = flat(maximum.axes)
        exponentials = algebra.exponential(maximum.body)
        fits = (
            within(substitute(exponentials, names), total.body)
            for total in denominators
            if len(flat(total.axes)) == len(axes)
            for names in renamings(axes, flat(total.axes))
        )
        if not any(fits):
            raise NearMissFound("a maximum is subtracted that is over other axes than the sum")


def _maxima_within(product: Product) -> Iterator[Max]:
    for atom, _ in product.factors:
        if isinstance(atom, Max):
            yield atom
        for child in atom.children:
            yield from _maxima_within(child)


def _signature(maximum: Max) -> tuple[object, ...]:
    """Return what a maximum is of and over which sizes, the same for other names of its axes."""
    over, kept = flat(maximum.axes), free(as_product(maximum))
    return (
        frozenset(leaves(maximum.body)),
        sorted(axis.sizes for axis in over),
        sorted(axis.sizes for axis in kept),
    )


def leaves(formula: Product) -> list[ir.Value]:
    """Return the tensors that a formula is made of, except within sums and maxima."""
    values: dict[ir.Value, None] = {}
    for atom, _ in formula.factors:
        if isinstance(atom, Leaf | Indicator):
            values[atom.value] = None
        for part in () if isinstance(atom, Sum | Max) else atom.children:
            values |= dict.fromkeys(leaves(part))
    return list(values)


def logits_of(factors: Product) -> Product:
    """Return the logarithm of a product of exponentials."""
    terms = [
        Product(atom.argument.factors, p) for atom, p in factors.factors if isinstance(atom, Exp)
    ]
    return algebra.add(terms)


def holds_infinity(formula: Product, probed: ProbedGraph) -> bool:
    """Return whether a tensor of the formula held a number that leaves a key out in a run."""
    for atom, _ in formula.factors:
        value = getattr(atom, "value", None)
        if value is not None:
            arrays = [probed.constant(value)]
            arrays += [run.get(str(value.name)) for run in (*probed.runs, *probed.edge_runs)]
            kept = [a for a in arrays if a is not None and a.size]
            if any(np.min(a.astype(np.float64)) < LOWEST for a in kept):
                return True
        if isinstance(atom, Plus) and any(holds_infinity(t, probed) for t in atom.terms):
            return True
    return False


def size_of(axes: Iterable[Axis]) -> int:
    """Return the number of entries of fixed axes together."""
    return int(np.prod([axis.sizes[0] for axis in axes], dtype=np.int64))


def same_size(first: Iterable[Axis], second: Iterable[Axis]) -> bool:
    """Return whether axes have as many entries together, in every run."""

    def total(axes: Iterable[Axis]) -> list[int]:
        return [int(np.prod(sizes)) for sizes in zip(*(a.sizes for a in axes), strict=True)]

    return total(first) == total(second)


def single(product: Product) -> Factor | None:
    """Return the one factor of a formula, None if it has several."""
    return product.factors[0] if len(product.factors) == 1 else None


def by_dependence(product: Product, axes: set[Axis]) -> tuple[Product, Product]:
    """Return the factors that depend on one of some axes, and those that do not."""
    depending = tuple(f for f in product.factors if free(as_product(f[0])) & axes)
    rest = tuple(f for f in product.factors if f not in depending)
    return Product(depending), Product(rest)


# Outside factors have no input of an operator, and multiply its result instead. They are the same
# for all keys: masks of query rows, scales of values, heads or channels, tensors without channels.
def without_outside(subject: Subject) -> tuple[Subject, Product]:
    """Return a subject without its outside factors, and these factors.

    Under a mask of rows that mask is 1 everywhere else, so it leaves the denominators too:
    ``m n / (m d + eps) = m n / (d + eps)``.
    """
    rest, outside = split_outside(subject, subject.formula)
    names = {
        key(as_product(a)) for a, _ in outside.factors if is_condition(a) or _is_integer(subject, a)
    }
    factors = tuple((_where_true(atom, names), power) for atom, power in rest.factors)
    formula = Product(factors, rest.coefficient, rest.exponent)
    return (replace(subject, formula=formula) if outside.factors else subject), outside


def split_outside(subject: Subject, product: Product) -> tuple[Product, Product]:
    """Return the factors of a product that a pattern has to account for, and the outside ones."""
    outside = tuple(f for f in product.factors if _is_outside(subject, *f))
    rest = tuple(f for f in product.factors if f not in outside)
    return Product(rest, product.coefficient, product.exponent), Product(outside)


def _is_outside(subject: Subject, atom: Atom, power: float) -> bool:
    if is_condition(atom):
        return power == 1.0
    if not isinstance(atom, Leaf):
        return False
    axes = free(as_product(atom))
    moving = bool(axes) and not any(axis.is_fixed for axis in axes)
    return subject.probed.constant(atom.value) is not None or (moving and power == 1.0)


def _is_integer(subject: Subject, atom: Atom) -> bool:
    """Return whether an atom is an input of integers, which as a mask is read as 0 and 1."""
    node = atom.value.producer() if isinstance(atom, Leaf) else None
    while node is not None and node.op_type in ("Cast", *layout.FORMULAS):
        source = node.inputs[0]
        if source is None or source.is_graph_input():
            return source is not None and not subject.probed.is_float(source)
        node = source.producer()
    return False


def _where_true(atom: Atom, names: set[str]) -> Atom:
    """Return a sum without its conditions of these names."""
    if not isinstance(atom, Plus) or not names:
        return atom
    terms = tuple(
        Product(
            tuple(f for f in term.factors if key(as_product(f[0])) not in names),
            term.coefficient,
            term.exponent,
        )
        for term in atom.terms
    )
    return Plus(terms, None, atom.dims)
