"""Sums over keys whose weights depend on the distance inside a window, and are equal outside:

c * sum_u f[u] + sum_j a[j] f[t + j + shift]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aftexport.recognition.formula.algebra import free, multiply, substitute
from aftexport.recognition.formula.axes import Axis, flat
from aftexport.recognition.formula.keys import key
from aftexport.recognition.formula.terms import (
    Atom,
    CausalMask,
    Exp,
    Plus,
    Product,
    Sum,
    Window,
    as_product,
)
from aftexport.recognition.formula.unreadable import Unreadable
from aftexport.recognition.patterns._constants import can_broadcast, evaluated
from aftexport.recognition.patterns.pattern import NearMissFound, Subject, same_size, sums, without


@dataclass(frozen=True)
class Term:
    """A sum over keys, of a window or of all.

    Attributes:
        total: the sum.
        summed: the axis of the keys' positions.
        inner: the summed factors that depend on the keys' positions.
        outside: the other summed factors, and the factors of the sum.
        window: the window, None for all keys.
        causal: whether keys after the query's position are left out.
    """

    total: Sum
    summed: Axis
    inner: Product
    outside: Product
    window: Window | None
    causal: bool


@dataclass(frozen=True)
class WindowedSums:
    """A numerator or denominator.

    Attributes:
        everywhere: the sum over all keys.
        offsets: the offsets of the window's keys from the query, ascending.
        weights: the weights ``a / c``, ``[channels ..., offsets]``.
        common: the computed factors of all terms.
        constants: the constant factors ``c`` of all terms.
    """

    everywhere: Term
    offsets: tuple[int, ...]
    weights: NDArray[np.float64]
    common: Product
    constants: Product


def parts(atom: Atom) -> tuple[Product, ...]:
    """Return the terms of a sum, or any other atom as the one term."""
    return atom.terms if isinstance(atom, Plus) else (as_product(atom),)


def weighs_keys(part: Product) -> bool:
    """Return whether a formula has a sum of a product with exponentials."""
    return any(
        isinstance(atom, Exp) for total in sums(part.factors, 1.0) for atom, _ in total.body.factors
    )


def terms_of(atom: Atom) -> list[Term]:
    """Return a numerator or denominator as terms; raises NearMissFound for any other term."""
    return [_term(part) for part in parts(atom)]


def _term(part: Product) -> Term:
    totals = sums(part.factors, 1.0)
    if not part.factors:
        raise NearMissFound(f"{part.coefficient:.3g} is added to the sums")
    if len(totals) != 1 or not weighs_keys(part):
        raise NearMissFound("a term is added that is not a sum of the keys' weights")
    (total,) = totals
    body = total.body
    windows = [atom for atom, _ in body.factors if isinstance(atom, Window)]
    causal_masks = [atom for atom, _ in body.factors if isinstance(atom, CausalMask)]
    axes = flat(total.axes)
    summed = windows[0].key if windows else axes[0]
    taps = [axis for axis in axes if axis is not summed]
    if len(windows) > 1:
        raise NearMissFound("the filter is of more than one dimension")
    if len(taps) > len(windows) or (windows and causal_masks) or summed not in axes:
        raise NearMissFound("a sum is not over the keys of a window, or over all keys")
    others = [f for f in body.factors if f[0] not in (*windows, *causal_masks)]
    inner = Product(tuple(f for f in others if summed in free(as_product(f[0]))))
    constants = Product(
        tuple(f for f in others if f not in inner.factors), body.coefficient, body.exponent
    )
    window = windows[0] if windows else None
    outside = multiply(constants, without(part, as_product(total)))
    return Term(total, summed, inner, outside, window, bool(causal_masks))


def query_tokens(subject: Subject, terms: Sequence[Term]) -> Axis:
    """Return the axis of the queries' positions."""
    steps = {
        axis: step
        for term in terms
        if term.window is not None
        for axis, step in term.window.positions
        if axis in subject.axes
    }
    if len(steps) != 1:
        raise NearMissFound("the windows do not depend only on the position of the query")
    ((tokens, step),) = steps.items()
    if step != 1:
        raise NearMissFound(f"the windows are {step} positions apart")
    if not all(same_size((tokens,), (term.summed,)) for term in terms):
        raise NearMissFound("queries and keys are of different sequences")
    return tokens


def windowed_sums(
    subject: Subject, terms: Sequence[Term], tokens: Axis, channels: tuple[Axis, ...]
) -> WindowedSums:
    """Return the terms of a numerator or denominator put together; raises NearMissFound."""
    everywhere = [term for term in terms if term.window is None]
    if not everywhere:
        raise NearMissFound("keys outside the window have no weight, as in a plain convolution")
    if len(everywhere) > 1:
        raise NearMissFound("there is more than one sum over all keys")
    (base,) = everywhere
    common, scale = _split_constants(subject, base, channels, None)
    weights_of: dict[int, NDArray[np.float64]] = {}
    for term in terms:
        if term.window is None:
            continue
        inner = substitute(term.inner, {term.summed: base.summed})
        if key(inner) != key(base.inner):
            raise NearMissFound("the window is of other keys or values than the sum over all")
        taps = [(axis, step) for axis, step in term.window.positions if axis is not tokens]
        if len(taps) > 1:
            raise NearMissFound("the windows do not depend only on the position of the query")
        tap, step = taps[0] if taps else (None, 0)
        own, weights = _split_constants(subject, term, channels, tap)
        if key(own) != key(common):
            raise NearMissFound("the window is scaled apart from the sum over all keys")
        for place in range(weights.shape[-1]):
            offset = term.window.shift + step * place
            weights_of[offset] = weights_of.get(offset, 0.0) + weights[..., place]
    if not weights_of:
        raise Unreadable("a window has no entries")
    offsets = tuple(sorted(weights_of))
    weights = np.stack([weights_of[offset] for offset in offsets], -1) / scale
    return WindowedSums(base, offsets, weights, common, without(base.outside, common))


def _split_constants(
    subject: Subject, term: Term, channels: tuple[Axis, ...], tap: Axis | None
) -> tuple[Product, NDArray[np.float64]]:
    """Return the computed factors of a term, and its constants as ``[channels, taps]``."""
    order = channels if tap is None else (*channels, tap)
    result = np.array(term.outside.coefficient * np.exp(term.outside.exponent))
    computed = []
    for factor in term.outside.factors:
        array = evaluated(Product((factor,)), order, subject.probed)
        if array is None:
            computed.append(factor)
        elif not can_broadcast(result, array):
            raise Unreadable("constants of different sizes are multiplied")
        else:
            result = result * array
    if tap is None and result.ndim:
        result = result[..., None]
    shape = [axis.sizes[0] for axis in order] + [1] * (tap is None)
    if any(size not in (1, whole) for size, whole in zip(result.shape, shape, strict=False)):
        raise Unreadable("a filter has another size than its window")
    return Product(tuple(computed)), np.broadcast_to(result, shape)
