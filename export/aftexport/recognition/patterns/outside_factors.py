"""Outside factors, which no operator has an input for and which multiply its result instead.

They are the same for all keys: masks of query rows, scales of values, heads or channels, and
tensors without channels.
"""

from dataclasses import replace

from aftexport.recognition.formula.algebra import free
from aftexport.recognition.formula.keys import key
from aftexport.recognition.formula.terms import Atom, Leaf, Plus, Product, as_product
from aftexport.recognition.patterns.pattern import Subject, is_condition
from aftexport.recognition.read import layout


def without_outside(subject: Subject) -> tuple[Subject, Product]:
    """Return a subject without its outside factors, and these factors.

    Under a mask of rows that mask is 1 everywhere else, so it leaves the denominators too:
    ``m n / (m d + eps) = m n / (d + eps)``.
    """
    rest, outside = split(subject, subject.formula)
    names = {
        key(as_product(a)) for a, _ in outside.factors if is_condition(a) or _is_integer(subject, a)
    }
    factors = tuple((_where_true(atom, names), power) for atom, power in rest.factors)
    formula = Product(factors, rest.coefficient, rest.exponent)
    return (replace(subject, formula=formula) if outside.factors else subject), outside


def split(subject: Subject, product: Product) -> tuple[Product, Product]:
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
