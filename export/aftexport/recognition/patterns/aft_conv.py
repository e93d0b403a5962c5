"""The pattern of AFT-conv: a sum over a window is added to a sum over all keys.

    num[b,t,h,d] = sum_j (exp(w[h,j]) - 1) exp(K[b,u,h]) V[b,u,h,d] + sum_v exp(K[b,v,h]) V[b,v,h,d]
    den[b,t,h] = the same without V;  gate(Q[b,t,h,d]) * num[b,t,h,d] / den[b,t,h]

with u = t + j - (s - 1) // 2; causal, u = t + j - (s - 1) and v up to t. A filter
may be any constant above -1, since each is an exponential minus 1.
"""

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.formula.algebra import free as axes_of
from aftexport.recognition.formula.algebra import multiply, power, substitute
from aftexport.recognition.formula.axes import Axis
from aftexport.recognition.formula.keys import key
from aftexport.recognition.formula.terms import ONE, Atom, Product
from aftexport.recognition.formula.windows import has_window
from aftexport.recognition.patterns._token_axes import check_tokens, packed
from aftexport.recognition.patterns._weighted_mean import WeightedMean
from aftexport.recognition.patterns._windowed_sums import (
    WindowedSums,
    parts,
    query_tokens,
    terms_of,
    weighs_keys,
    windowed_sums,
)
from aftexport.recognition.patterns.outside_factors import split
from aftexport.recognition.patterns.pattern import (
    NearMissFound,
    Operand,
    Rewrite,
    Subject,
    check_maxima,
    leaves,
    refuse_clamped,
    without,
)
from aftexport.recognition.read import layout


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
    outer, outside = split(
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


def _rewrite(
    mean: WeightedMean,
    gating: tuple[str, Operand],
    filters: NDArray[np.float64],
    outside: Product,
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
    """Raise NearMissFound where numerator or denominator is not a sum over a window and all keys.

    Args:
        subject: the value.
        has_window: whether one of the two is such a sum.
    """
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
