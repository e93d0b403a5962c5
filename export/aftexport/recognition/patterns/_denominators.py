"""Denominators of linear attention that another operation changed: each raises NearMissFound."""

from aftexport.recognition.formula.axes import flat
from aftexport.recognition.formula.terms import (
    Atom,
    Exp,
    Function,
    Indicator,
    Leaf,
    Plus,
    Product,
    Sum,
)
from aftexport.recognition.patterns.pattern import NearMissFound, Subject, leaves, sums


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
        others = [a for a, _ in term.factors if not isinstance(a, Sum)]
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
