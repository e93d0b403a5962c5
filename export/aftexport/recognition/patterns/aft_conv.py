"""The pattern of AFT-conv: a sum over a window is added to a sum over all keys.

    num[b,t,h,d] = sum_j (exp(w[h,j]) - 1) exp(K[b,u,h]) V[b,u,h,d] + sum_v exp(K[b,v,h]) V[b,v,h,d]
    den[b,t,h] = the same without V;  gate(Q[b,t,h,d]) * num[b,t,h,d] / den[b,t,h]

with u = t + j - (s - 1) // 2; causal, u = t + j - (s - 1) and v up to t. A filter
may be any constant above -1, since each is an exponential minus 1. Sums over keys
whose weights depend on the distance inside a window, and are equal outside, are read as

    c * sum_u f[u] + sum_j a[j] f[t + j + shift]
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.algebra import free, has_window, key, multiply, power, substitute
from aftexport.recognition.algebra import free as axes_of
from aftexport.recognition.patterns._weighted_mean import WeightedMean
from aftexport.recognition.patterns.channels import check_tokens, packed
from aftexport.recognition.patterns.evaluation import can_broadcast, evaluated
from aftexport.recognition.patterns.pattern import (
    DIVIDE_BY_SUM,
    NearMissFound,
    Operand,
    Rewrite,
    Subject,
    check_maxima,
    leaves,
    refuse_clamped,
    same_size,
    split_outside,
    sums,
    without,
)
from aftexport.recognition.read import layout
from aftexport.recognition.terms import (
    ONE,
    Atom,
    Axis,
    CausalMask,
    Exp,
    Plus,
    Product,
    Sum,
    Unreadable,
    Window,
    as_product,
    flat,
)


def match(subject: Subject) -> Rewrite | None:
    """Return AFT-conv; see ``Pattern``."""
    factors = subject.formula.factors
    above = [atom for atom, p in factors if p == 1.0 and _has_window(atom)]
    below = [atom for atom, p in factors if p == -1.0 and _has_window(atom)]
    if len(above) != 1 or len(below) != 1:
        _refuse_other_windows(subject, has_window=bool(above or below))
        return None
    terms = terms_of(above[0]), terms_of(below[0])
    tokens = query_tokens(subject, (*terms[0], *terms[1]))
    batch, channels = packed(subject, [axis for axis in subject.axes if axis is not tokens])
    numerator = windowed_sums(subject, terms[0], tokens, channels)
    denominator = windowed_sums(subject, terms[1], tokens, channels)
    keys, value = _keys_and_value(numerator, denominator)
    summed, causal = numerator.everywhere.summed, numerator.everywhere.causal
    refuse_clamped(keys)
    check_maxima(subject, [denominator.everywhere.total])
    check_tokens(subject, (tokens,), (summed,), keys)
    rest = Product(
        tuple(f for f in factors if f[0] not in (above[0], below[0])),
        subject.formula.coefficient,
        subject.formula.exponent,
    )
    divisor = multiply(denominator.common, denominator.constants)
    outer, outside = split_outside(
        subject, multiply(rest, numerator.common, numerator.constants, power(divisor, -1.0))
    )
    mean = WeightedMean(
        subject,
        keys,
        ONE,
        value,
        Product(outer.factors),
        (summed,),
        (tokens,),
        batch,
        tuple(sorted(channels, key=lambda axis: axis not in axes_of(keys))),
        causal,
    )
    gating = mean.gating
    if gating is None:
        raise NearMissFound("the factor of the mean is neither sigmoid nor tanh of one tensor")
    filters = _filters(numerator, channels, axes_of(keys), causal=causal)
    constants = Product((), outer.coefficient, outer.exponent)
    return _rewrite(mean, gating, filters, multiply(constants, outside))


@dataclass(frozen=True)
class Term:
    """A sum over keys, of a window or of all."""

    total: Sum
    summed: Axis  # the axis of the keys' positions
    inner: Product  # the summed factors that depend on the keys' positions
    outside: Product  # the other summed factors, and the factors of the sum
    window: Window | None  # None for all keys
    causal: bool  # whether keys after the query's position are left out


@dataclass(frozen=True)
class WindowedSums:
    """A numerator or denominator."""

    everywhere: Term  # the sum over all keys
    offsets: tuple[int, ...]  # the offsets of the window's keys from the query, ascending
    weights: NDArray[np.float64]  # the weights ``a / c``, ``[channels ..., offsets]``
    common: Product  # the computed factors of all terms
    constants: Product  # the constant factors ``c`` of all terms


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
        raise NearMissFound(f"{part.coefficient:.3g} is added to the sums", DIVIDE_BY_SUM)
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


def _rewrite(
    mean: WeightedMean, gating: tuple[str, Operand], filters: NDArray[np.float64], outside: Product
) -> Rewrite:
    return Rewrite(
        "aft_conv",
        "CausalAftConv" if mean.causal else "AftConv",
        [gating[1], mean.key_operand, mean.value_operand, filters],
        mean.groups(mean.tokens),
        {"num_heads": len(filters), "gate": gating[0]},
        outside=outside,
    )


def _refuse_other_windows(subject: Subject, *, has_window: bool) -> None:
    """Raise NearMissFound unless numerator and denominator sum over a window and all keys."""
    factors = subject.formula.factors
    mixed = [(atom, p) for atom, p in factors if _is_mixed(atom)]
    if {1.0, -1.0} <= {p for _, p in mixed}:
        raise NearMissFound(_added(subject, (atom for atom, p in mixed if p == 1.0)))
    sides = {p for atom, p in factors if any(weighs_keys(part) for part in parts(atom))}
    if has_window and {1.0, -1.0} <= sides:
        raise NearMissFound("not both numerator and denominator are sums over a window")


def _has_window(atom: Atom) -> bool:
    return any(has_window(part) for part in parts(atom))


def _is_mixed(atom: Atom) -> bool:
    """Return whether other terms are added to a sum of the keys' weights."""
    weighed = [weighs_keys(part) for part in parts(atom) if part.factors]
    return any(weighed) and not all(weighed)


def _added(subject: Subject, numerators: Iterable[Atom]) -> str:
    """Return the condition that the terms added to sums of the keys' weights fail."""
    term = "the term that is added to the sums over all keys is"
    mixed = [atom for atom in numerators if _is_mixed(atom)]
    others = [part for atom in mixed for part in parts(atom) if not weighs_keys(part)]
    for convolution in filter(None, (_convolution(v) for part in others for v in leaves(part))):
        if _is_of_each_channel(subject, convolution):
            return f"{term} a convolution of keys with padding other than zeros"
        return f"{term} not a depthwise convolution of stride 1 without a bias"
    return f"{term} not a sum over a window of keys"


def _convolution(value: ir.Value) -> ir.Node | None:
    """Return the convolution whose entries a value has, None without one."""
    node = value.producer()
    while node is not None and node.op_type in (*layout.FORMULAS, "Gather", "Slice"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node if node is not None and node.op_type == "Conv" else None


def _is_of_each_channel(subject: Subject, convolution: ir.Node) -> bool:
    attributes, weight = convolution.attributes, subject.reader.input(convolution, 1)
    return (
        set(subject.reader.shape(weight)[0]) == {attributes.get_int("group", 1)}
        and set(attributes.get_ints("strides", [1])) == {1}
        and len([v for v in convolution.inputs if v is not None]) == 2
    )


def _keys_and_value(numerator: WindowedSums, denominator: WindowedSums) -> tuple[Product, Product]:
    above, below = numerator.everywhere, denominator.everywhere
    keys = substitute(below.inner, {below.summed: above.summed})
    value = without(above.inner, keys)
    if key(multiply(value, keys)) != key(above.inner) or above.summed not in axes_of(value):
        raise NearMissFound("numerator and denominator have different weights")
    if above.causal != below.causal:
        raise NearMissFound("numerator and denominator are sums over different keys")
    if numerator.offsets != denominator.offsets or not np.allclose(
        numerator.weights, denominator.weights, rtol=1e-9, atol=0.0
    ):
        raise NearMissFound("numerator and denominator have different filters")
    return keys, value


def _filters(
    windowed: WindowedSums, channels: tuple[Axis, ...], own: set[Axis], *, causal: bool
) -> NDArray[np.float64]:
    """Return the biases ``[heads, s]`` of the channels that have keys of their own."""
    first, taps = windowed.offsets[0], len(windowed.offsets)
    if windowed.offsets != tuple(range(first, first + taps)):
        raise NearMissFound("the filter is dilated")
    if first != (1 - taps if causal else -((taps - 1) // 2)):
        raise NearMissFound(
            f"the window begins {first} positions from the query: its padding is another"
        )
    weights = windowed.weights
    for place, axis in enumerate(channels):
        if axis not in own:
            if np.ptp(weights, axis=place).any():
                raise NearMissFound("the filter differs among channels that share a key")
            weights = weights.take([0], place)
    if not (weights > -1.0).all():
        raise NearMissFound("a key's weight in the window is 0 or less")
    return np.log1p(weights).reshape(-1, taps)
