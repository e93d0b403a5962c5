"""Denominators of linear attention: their forms, and changes that raise NearMissFound."""

from dataclasses import dataclass

from aftexport.recognition.formula.axes import flat
from aftexport.recognition.formula.terms import (
    Atom,
    Count,
    Exp,
    Function,
    Indicator,
    Leaf,
    Plus,
    Product,
    Sum,
    as_product,
    single_atom,
)
from aftexport.recognition.patterns.pattern import NearMissFound, Subject, leaves, sums


@dataclass(frozen=True)
class Denominator:
    """A denominator that is a sum of terms, each with one sum over tokens.

    Attributes:
        normalizer: ``add`` if the number is added to the terms, ``clamp`` if it is their minimum.
        number: the number.
        terms: the terms.
    """

    normalizer: str
    number: float
    terms: tuple[Product, ...]

    @property
    def fixed(self) -> tuple[Sum, float] | None:
        """The sum and its scale, None if there are several terms or other factors."""
        (term, *others) = self.terms
        if others or len(term.factors) != 1:
            return None
        total = term.factors[0][0]
        assert isinstance(total, Sum)
        return total, term.coefficient


def denominator_of(atom: Atom) -> Denominator | None:
    """Return the parts of a denominator, None for another formula."""
    if isinstance(atom, Function):
        return _clamped(atom)
    added = 0.0
    terms: list[Product] = []
    for term in atom.terms if isinstance(atom, Plus) else (as_product(atom),):
        if not term.factors:
            added += term.coefficient
        elif len(sums(term.factors, 1.0)) == 1:
            terms.append(term)
        else:
            return None
    return Denominator("add", added, tuple(terms)) if terms else None


def _clamped(function: Function) -> Denominator | None:
    """Return the parts of a denominator with a minimum, and with nothing that is added."""
    arguments, node = list(function.arguments), function.value and function.value.producer()
    if not node or node.op_type not in ("Clip", "Max") or len(arguments) != 2:
        return None
    if node.op_type == "Clip" and node.inputs[1] is None:
        return None  # a maximum
    numbers = [a for a in arguments if not a.factors]
    others = [a for a in arguments if a.factors]
    if len(numbers) != 1 or (node.op_type == "Clip" and arguments[1].factors):
        return None
    atom = single_atom(Product(others[0].factors))
    inner = denominator_of(atom) if atom is not None else None
    if others[0].coefficient != 1.0 or inner is None:
        term = others[0]
        fits = len(sums(term.factors, 1.0)) == 1
        return Denominator("clamp", numbers[0].coefficient, (term,)) if fits else None
    if inner.number or inner.normalizer != "add":
        return None
    return Denominator("clamp", numbers[0].coefficient, inner.terms)


def refuse_changed_keys(total: Sum) -> None:
    """Raise NearMissFound if numbers are added to the sum of keys that queries multiply."""
    for atom, _ in total.body.factors:
        terms = atom.terms if isinstance(atom, Plus) else ()
        constants = [term.coefficient for term in terms if not term.factors]
        if constants and any(sums(term.factors, 1.0) for term in terms):
            raise NearMissFound(
                f"{constants[0]:.3g} is added to the sum of the keys before queries multiply it:"
                " add it to the denominator"
            )


def refuse_masked_denominator(atom: Atom) -> None:
    """Raise NearMissFound if factors multiply the denominator before eps is added."""
    for term in atom.terms if isinstance(atom, Plus) else ():
        others = [a for a, _ in term.factors if not isinstance(a, Sum | Count)]
        if not sums(term.factors, 1.0) or not others:
            continue
        if any(isinstance(other, Indicator) for other in others):
            raise NearMissFound("the denominator is multiplied by a mask, and the numerator is not")
        names = [str(other.value.name) for other in others if isinstance(other, Leaf)]
        raise NearMissFound(
            f"the denominator is multiplied by {', '.join(names) or 'a tensor'} before eps is"
            " added: make it one of true and false, if it is a mask of queries"
        )


def refuse_cut_denominator(subject: Subject) -> None:
    """Raise NearMissFound if the denominator is cut out of a product of features and values."""
    for factor in subject.formula.factors:
        for leaf in leaves(Product((factor,))) if factor[1] == -1.0 else ():
            node = leaf.producer()
            if node is None or node.op_type != "Slice":
                continue
            product = subject.reader.read_separately(subject.reader.input(node, 0))
            for total in sums(product.factors, 1.0):
                mapped = any(isinstance(a, Function | Plus | Exp) for a, _ in total.body.factors)
                if mapped and len(flat(total.axes)) > 1:
                    raise NearMissFound(
                        "the denominator is cut out of a product of features and values, and is"
                        " not known to be of a column of ones after the values"
                    )
