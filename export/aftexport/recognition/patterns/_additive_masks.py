"""Masks of logits as terms: a condition that leaves tokens out becomes a number that is added.

    where(m, x, -1e9)  ->  x - 1e30 (1 - m)          exp(x) m  ->  exp(x - 1e30 (1 - m))

The number is so low that logits round to it when it is added. If a document has no token that
counts, all its tokens so have the same weight, as where one number replaces their logits.
"""

import numpy as np

from aftexport.recognition.formula import algebra
from aftexport.recognition.formula.algebra import negation
from aftexport.recognition.formula.keys import key
from aftexport.recognition.formula.terms import Function, Plus, Product, single_atom
from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.patterns.pattern import LOWEST, Subject, leaves

MAX_FILL = -1e4
"""The highest number that leaves a token out, as a fill of logits or the factor of a mask."""


def additive_terms(subject: Subject, logits: Product, mask: Product) -> tuple[Product, ...]:
    """Return the terms of logits, with the masks of their exponentials as further terms.

    Args:
        subject: the value.
        logits: the logits.
        mask: the conditions that multiply the exponentials of the logits.
    """
    lowest = -6e4 if _is_half(logits, subject.probed) else LOWEST
    terms: list[Product] = []
    left_out = [negation(mask)] if mask.factors else []
    pending = [logits]
    while pending:
        term = pending.pop()
        atom = single_atom(Product(term.factors))
        filled = _filled(atom) if isinstance(atom, Function) and term.coefficient > 0.0 else None
        if isinstance(atom, Plus) and abs(term.coefficient) < -MAX_FILL:
            pending += [algebra.scaled(part, term.coefficient) for part in atom.terms]
        elif filled is not None:
            kept, condition = filled
            pending.append(algebra.scaled(kept, term.coefficient))
            left_out.append(condition)
        else:
            terms.append(_limited(term, lowest))
    different = {key(condition): condition for condition in left_out}
    return (*terms, *(algebra.scaled(condition, lowest) for condition in different.values()))


def _filled(function: Function) -> tuple[Product, Product] | None:
    """Return logits without their fill, and the condition of the fill; None without a fill."""
    if function.name != "Where":
        return None
    condition, first, second = function.arguments
    for number, kept, left_out in (
        (first, second, condition),
        (second, first, negation(condition)),
    ):
        if not number.factors and number.coefficient <= MAX_FILL and kept.factors:
            return kept, left_out
    return None


def _limited(term: Product, lowest: float) -> Product:
    """Return a term whose coefficient is clipped to ``lowest`` and its negative."""
    return Product(term.factors, float(np.clip(term.coefficient, lowest, -lowest)), term.exponent)


def _is_half(logits: Product, probed: ProbedGraph) -> bool:
    return any(probed.has(value) and probed.dtype(value) == np.float16 for value in leaves(logits))
