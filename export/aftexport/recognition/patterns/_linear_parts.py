"""A weighted sum that may be divided by the sum of its weights, taken apart for linear attention.

sum_du Q[b,t,h,d] K[b,u,h,d] V[b,u,h,e]
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.recognition.algebra import free
from aftexport.recognition.patterns.channels import Roles, roles_of
from aftexport.recognition.patterns.evaluation import whole
from aftexport.recognition.patterns.pattern import Division, Subject, by_dependence, without
from aftexport.recognition.terms import Atom, Axis, CausalMask, Indicator, Leaf, Product, flat


@dataclass(frozen=True)
class Parts:
    """A weighted sum and its normalizer."""

    subject: Subject
    weights: Product
    value: Product
    bound: tuple[Axis, ...]  # the summed axes
    normalizer: str  # ``add``, ``clamp`` or ``none``; see the operator
    eps: float
    scale: float

    @cached_property
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
        return [a for a, _ in self.weights.factors if is_causal_mask(self.subject, a)]

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
        """The roles of the axes, None if they do not fit."""
        return roles_of(
            self.subject, self.query, self.key_and_mask, self.value, self.channels, self.summed
        )

    @property
    def operator(self) -> str:
        """The operator of the domain."""
        return f"{'Causal' * bool(self.causal_masks)}NormalizedLinearAttention"

    def attributes(self, feature_map: str, channels: int) -> dict[str, int | float | str]:
        """Return the attributes of the operator."""
        assert self.roles is not None
        # A channel of ones after the values makes them wider than the keys.
        own = self.roles.attributes(channels, int(self.is_eps_small))
        normalizer = "none" if self.is_eps_small else self.normalizer
        eps = {"eps": self.eps} if normalizer != "none" else {}
        changed = {"normalizer": normalizer} if normalizer != "add" else {}
        return {**own, "feature_map": feature_map, **eps, **changed}

    @property
    def is_eps_small(self) -> bool:
        """Whether the operator would raise eps, so that nodes after it have to divide."""
        # A float32 holds MIN_EPS as a number a little below it.
        return self.normalizer != "none" and self.eps < float(np.float32(MIN_EPS))

    @property
    def division(self) -> Division | None:
        """The division after the operator, None if the operator divides or nothing does."""
        return Division(self.normalizer, self.eps) if self.is_eps_small else None

    @property
    def note(self) -> str:
        """The reason for such a division."""
        if not self.is_eps_small:
            return ""
        return (
            f"its eps is {self.eps:g}, and the smallest of the operator is {MIN_EPS:g}:"
            " nodes after the operator divide"
        )


def refusal_of_normalizer(parts: Parts) -> str | None:
    """Return the reason why the number of a normalizer is not that of the operator."""
    if parts.normalizer == "add" and parts.eps < 0.0:
        return f"{parts.eps:.3g} is added to the denominator, and eps is 0 or more"
    if parts.normalizer == "clamp" and parts.eps <= 0.0:
        return f"the denominator is at least {parts.eps:.3g}, and a minimum is more than 0"
    return None


def is_causal_mask(subject: Subject, atom: Atom) -> bool:
    """Return whether an atom is 1 for the keys up to the query and 0 for those after it."""
    return isinstance(atom, CausalMask) or _is_lower(subject, atom)


def _is_lower(subject: Subject, atom: Atom) -> bool:
    """Return whether an atom is a constant of ones up to the diagonal and zeros after it."""
    if not isinstance(atom, Leaf | Indicator):
        return False
    array = whole(atom.value, subject.probed)
    axes = [flat(dim) for dim in atom.dims if flat(dim)]
    tokens = max(array.shape, default=0) if array is not None else 0
    if array is None or len(axes) != 2 or array.size != tokens**2:
        return False
    matrix = array.reshape(tokens, tokens).astype(np.float64)
    if isinstance(atom, Indicator) and not atom.holds:
        matrix = 1.0 - matrix
    first_is_query = axes[0][0] in subject.axes
    return bool(
        np.array_equal(matrix if first_is_query else matrix.T, np.tril(np.ones_like(matrix)))
    )
