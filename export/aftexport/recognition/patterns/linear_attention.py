"""The pattern of linear attention, with or without eps; causal sums run up to u = t:

sum_du phi(Q[b,t,h,d]) phi(K[b,u,h,d]) V[b,u,h,e] / (sum_du phi(Q[b,t,h,d]) phi(K[b,u,h,d]) + eps)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.recognition.formula.algebra import free
from aftexport.recognition.formula.axes import Axis, flat
from aftexport.recognition.formula.terms import (
    Atom,
    CausalMask,
    Exp,
    Indicator,
    Leaf,
    Product,
    as_product,
    number,
)
from aftexport.recognition.patterns._constants import whole
from aftexport.recognition.patterns._denominators import (
    refuse_changed_keys,
    refuse_cut_denominator,
    refuse_masked_denominator,
)
from aftexport.recognition.patterns._roles import Roles, roles_of
from aftexport.recognition.patterns._token_axes import check_tokens
from aftexport.recognition.patterns.elementwise import Elementwise, classified
from aftexport.recognition.patterns.pattern import (
    Factor,
    NearMissFound,
    Operand,
    Rewrite,
    Subject,
    aligned,
    by_dependence,
    fixed_sum,
    leaves,
    refuse_changed_denominator,
    refuse_input_weights,
    single,
    size_of,
    sums,
    without,
)

FEATURE_MAPS: dict[str, Elementwise] = {
    "elu": lambda x: np.where(x > 0, x + 1.0, np.exp(np.minimum(x, 0.0))),
    "relu": lambda x: np.maximum(x, 0.0),
}
_LOWEST = -10.0
"""The lowest x for which elu(x) + 1 keeps enough digits of exp(x) in float64."""
_SMALL_EPS = (
    f"eps is {{:g}} in the graph; {MIN_EPS:g}, the smallest that is safe in float32, is written."
    " Where the normalizer is 0 the result is 0, and was NaN if eps was 0"
)


def match(subject: Subject) -> Rewrite | None:
    """Return linear attention; see ``Pattern``."""
    formula = subject.formula
    refuse_cut_denominator(subject)
    numerators = sums(formula.factors, 1.0)
    if len(numerators) != 1 or len(formula.factors) != 2:
        return None
    body, bound = numerators[0].body, flat(numerators[0].axes)
    below = next(((a, p) for a, p in formula.factors if a is not numerators[0]), None)
    if below is None or below[1] != -1.0 or len(bound) < 2:
        return None
    denominator = fixed_sum(as_product(below[0]))
    if denominator is None:
        refuse_masked_denominator(below[0])
        refuse_changed_denominator(formula.factors)
        return None
    total, eps, scale = denominator
    alignment = aligned(total, body, bound)
    if alignment is None:
        refuse_changed_keys(total)
        raise NearMissFound("numerator and denominator have different weights")
    weights, value = alignment[0], without(body, alignment[0])
    if formula.coefficient == 1.0 != scale:
        raise NearMissFound("the denominator is scaled, and the numerator is not")
    parts = _Parts(subject, weights, value, bound, eps, formula.coefficient / scale)
    for check in _CHECKS:
        if (reason := check(parts)) is None:
            continue
        if reason == _OTHER:
            return None
        raise NearMissFound(reason)
    return _rewrite(parts)


@dataclass(frozen=True)
class _Parts:
    """A weighted sum that is divided by the sum of its weights, taken apart.

    Attributes:
        subject: the value.
        weights: the factors that numerator and denominator share.
        value: the other factors of the numerator.
        bound: the summed axes.
        eps: the number that is added to the denominator.
        scale: the number that multiplies the quotient.
    """

    subject: Subject
    weights: Product
    value: Product
    bound: tuple[Axis, ...]
    eps: float
    scale: float

    @property
    def summed(self) -> tuple[Axis, ...]:
        """The axes of the keys' positions."""
        return tuple(axis for axis in self.bound if axis in free(self.value))

    @property
    def channels(self) -> list[Axis]:
        """The axes in which query and key meet."""
        return [axis for axis in self.bound if axis not in free(self.value)]

    @cached_property
    def causal_masks(self) -> list[Atom]:
        """The weights that leave out the keys after the query."""
        return [a for a, _ in self.weights.factors if _is_causal_mask(self.subject, a)]

    @cached_property
    def features(self) -> Product:
        """The weights without causal masks."""
        return Product(tuple(f for f in self.weights.factors if f[0] not in self.causal_masks))

    @cached_property
    def query(self) -> Product:
        """The features that do not depend on the key's position."""
        return by_dependence(self.features, {*self.summed})[1]

    @cached_property
    def key_and_mask(self) -> Product:
        """The features that depend on the key's position."""
        return by_dependence(self.features, {*self.summed})[0]

    @cached_property
    def mask(self) -> Product:
        """The mask of keys, which has no channels."""
        return by_dependence(self.key_and_mask, {*self.channels})[1]

    @cached_property
    def key(self) -> Product:
        """The features of the key."""
        return without(self.key_and_mask, self.mask)

    @cached_property
    def roles(self) -> Roles | None:
        """The axes of tokens, heads, batch and value channels; raises NearMissFound."""
        return roles_of(
            self.subject, self.query, self.key_and_mask, self.value, self.channels, self.summed
        )

    @cached_property
    def feature_map(self) -> tuple[str, Product, Product] | None:
        """The function that makes the features, and the query and key that it is applied to."""
        query, key = (_features(self.subject, product) for product in (self.query, self.key))
        if query is None or key is None or query[0] != key[0]:
            return None
        return query[0], query[1], key[1]


def _check_causal_masks(parts: _Parts) -> str | None:
    if any(_is_causal_mask(parts.subject, atom) for atom, _ in parts.value.factors):
        return "numerator and denominator are sums over different keys"
    return None


def _check_features(parts: _Parts) -> str | None:
    atoms = [atom for atom, _ in parts.features.factors]
    if not parts.summed or not parts.channels or len(atoms) < 2:
        return _OTHER
    # Softmax features are those of other mechanisms.
    return _OTHER if any(isinstance(atom, Exp) for atom in atoms) else None


def _check_score_mask(parts: _Parts) -> str | None:
    positions = set(parts.subject.axes) - free(parts.value)
    if free(parts.key_and_mask) & positions:
        return "the scores' mask is not known to be of the keys after the query"
    return None


def _check_roles(parts: _Parts) -> str | None:
    return _OTHER if parts.roles is None else None


def _check_key_mask(parts: _Parts) -> str | None:
    refuse_input_weights(parts.mask)
    if len(parts.query.factors) != 1 or len(parts.key.factors) != 1:
        return "the features are multiplied by a tensor that is not a mask of keys"
    return None


def _check_feature_map(parts: _Parts) -> str | None:
    if parts.feature_map is None:
        return "the feature map is neither elu(x) + 1 nor relu(x)"
    return None


def _check_tokens(parts: _Parts) -> str | None:
    assert parts.roles is not None
    assert parts.feature_map is not None
    tokens, (_, _, key) = parts.roles[0], parts.feature_map
    check_tokens(parts.subject, tokens, parts.summed, key, parts.channels)
    return None


def _check_eps(parts: _Parts) -> str | None:
    if parts.eps < 0.0:
        return f"{parts.eps:.3g} is added to the denominator, and eps is 0 or more"
    return None


_OTHER = "another mechanism"
"""The result of a check for a value that does not resemble linear attention."""
_CHECKS: Sequence[Callable[[_Parts], str | None]] = (
    _check_causal_masks,
    _check_features,
    _check_score_mask,
    _check_roles,
    _check_key_mask,
    _check_feature_map,
    _check_tokens,
    _check_eps,
)
"""The conditions in order: each returns the reason of a near miss, ``_OTHER``, or None if it holds.

A check relies on those before it.
"""


def _rewrite(parts: _Parts) -> Rewrite:
    """Return the operator for parts that passed all checks."""
    assert parts.roles is not None
    assert parts.feature_map is not None
    (tokens, heads, batch, wide), summed = parts.roles, parts.summed
    name, query, key = parts.feature_map
    packed, eps = (*heads, *parts.channels), parts.eps
    inputs = [value for formula in (query, key) for value in leaves(formula)]
    return Rewrite(
        "linear_attention",
        "CausalNormalizedLinearAttention" if parts.causal_masks else "NormalizedLinearAttention",
        [
            Operand(query, (batch, tokens, packed)),
            # The logarithm of a masked weight is below that of every key with positive features.
            Operand(key, (batch, summed, packed), parts.mask),
            Operand(parts.value, (batch, summed, (*heads, *wide))),
        ],
        (batch, tokens, (*heads, *wide)),
        {"num_heads": size_of(heads), "feature_map": name, "eps": max(eps, MIN_EPS)},
        lowest={value: _LOWEST for value in inputs if parts.subject.probed.is_float(value)},
        outside=number(parts.scale),
        proven={"eps": eps},
        # In float32 the smallest eps is a little below MIN_EPS.
        note="" if eps >= np.float32(MIN_EPS) else _SMALL_EPS.format(eps),
    )


def _features(subject: Subject, product: Product) -> tuple[str, Product] | None:
    factor: Factor | None = single(product)
    return classified(subject, factor, FEATURE_MAPS) if factor is not None else None


def _is_causal_mask(subject: Subject, atom: Atom) -> bool:
    return isinstance(atom, CausalMask) or _is_lower(subject, atom)


def _is_lower(subject: Subject, atom: Atom) -> bool:
    """Return whether an atom is a constant of ones up to the diagonal and zeros after it."""
    if not isinstance(atom, Leaf | Indicator):
        return False
    array = whole(atom.value, subject.probed)
    axes = [flat(dim) for dim in atom.dims if flat(dim)]
    if array is None or len(axes) != 2 or array.size != array.shape[-1] ** 2:
        return False
    matrix = array.reshape(array.shape[-1], array.shape[-1]).astype(np.float64)
    if isinstance(atom, Indicator) and not atom.holds:
        matrix = 1.0 - matrix
    first_is_query = axes[0][0] in subject.axes
    return bool(
        np.array_equal(matrix if first_is_query else matrix.T, np.tril(np.ones_like(matrix)))
    )
