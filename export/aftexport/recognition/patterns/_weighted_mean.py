"""The weighted mean of values, channel by channel, that the AFT mechanisms share.

G[b,t,c] * sum_u exp(K[b,u,c] + w[t,u]) V[b,u,c] / sum_u exp(K[b,u,c] + w[t,u])
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aftexport.recognition.algebra import free
from aftexport.recognition.patterns._linear_parts import is_causal_mask
from aftexport.recognition.patterns.channels import packed
from aftexport.recognition.patterns.evaluation import evaluated, gate
from aftexport.recognition.patterns.failed_conditions import depends_on_inputs_within, has_values
from aftexport.recognition.patterns.pattern import (
    DIVIDE_BY_SUM,
    OTHER_KEYS,
    OTHER_WEIGHTS,
    Factor,
    NearMissFound,
    Operand,
    Subject,
    aligned,
    by_dependence,
    check_maxima,
    fixed_sum,
    holds_infinity,
    logits_of,
    refuse_changed_denominator,
    refuse_clamped,
    refuse_input_weights,
    same_size,
    size_of,
    sums,
    without,
    zeroed,
)
from aftexport.recognition.terms import (
    Atom,
    Axis,
    CausalMask,
    Count,
    Dims,
    Exp,
    Function,
    Max,
    Product,
    Sum,
    as_product,
    flat,
    single_atom,
)


@dataclass(frozen=True)
class WeightedMean:
    """A mean over ``summed`` with a row of the output for each of ``tokens``."""

    subject: Subject
    keys: Product  # the factors of the weights that do not depend on the query's position
    biases: Product  # the factors of the weights that depend only on the two positions
    value: Product
    outer: Product
    summed: tuple[Axis, ...]  # the axes of the keys' positions
    tokens: tuple[Axis, ...]  # the axes of the queries' positions
    batch: tuple[Axis, ...]  # the axes that are packed into the first dim
    channels: tuple[Axis, ...]  # the axes that are packed into the last dim
    causal: bool  # whether keys after the query's position are left out
    scale: float = 1.0
    eps: float = 0.0  # the number that is added to the sum of the weights

    def groups(self, positions: tuple[Axis, ...]) -> Dims:
        """Return the dims of ``[B, T, D]``."""
        return (self.batch, positions, self.channels)

    @property
    def key_operand(self) -> Operand:
        """The keys: the logarithm of their weights; channels of a head may share one."""
        exponentials = Product(tuple(f for f in self.keys.factors if isinstance(f[0], Exp)))
        weights = without(self.keys, exponentials)
        logits = logits_of(exponentials)
        floored = holds_infinity(logits, self.subject.probed)
        own = tuple(axis for axis in self.channels if axis in free(self.keys))
        return Operand(logits, (self.batch, self.summed, own), weights, floored)

    @property
    def spread_key_operand(self) -> Operand:
        """The keys with one number for each channel; shared ones are repeated."""
        shared = any(axis not in free(self.keys) for axis in self.channels)
        return replace(self.key_operand, groups=self.groups(self.summed), is_spread=shared)

    @property
    def value_operand(self) -> Operand:
        """The values."""
        value = zeroed(self.value, self.keys, self.subject.reader)
        return Operand(value, self.groups(self.summed))

    @property
    def gating(self) -> tuple[str, Operand] | None:
        """The gate and its query, ``none`` for a bare mean; None if other factors are outside."""
        factors = self.outer.factors
        if not factors:
            return "none", Operand(self.value, self.groups(self.summed))
        gated = gate(self.subject, list(factors))
        return (gated[0], Operand(gated[1], self.groups(self.tokens))) if gated else None


def weighted_mean(subject: Subject) -> WeightedMean | None:
    """Return the weighted mean that a subject is, None if it is not one; raises NearMissFound."""
    formula = subject.formula
    numerators = sums(formula.factors, 1.0)
    if len(numerators) != 1:
        return None
    (numerator,) = numerators
    summed = flat(numerator.axes)
    if not any(isinstance(atom, Exp) for atom, _ in numerator.body.factors):
        return None
    if not has_values(numerator.body, {*summed}):
        return None  # a sum of weights without values
    denominators = _denominators(formula)
    if not denominators:
        refuse_changed_denominator(formula.factors, DIVIDE_BY_SUM)
        for inner in sums(numerator.body.factors, -1.0):
            atoms = [atom for atom, _ in inner.body.factors]
            if any(isinstance(atom, CausalMask) for atom in atoms):
                raise NearMissFound(
                    "each weight is divided by the sum of those up to its own key, and not up to"
                    " the query"
                )
            if any(isinstance(atom, Exp) for atom in atoms):
                raise NearMissFound("the softmax is over another axis than the sum of the values")
        return None
    if len(denominators) != 1:
        return None
    alignment = aligned(denominators[0].total, numerator.body, summed)
    if alignment is None or alignment[1] != set(summed):
        if all(sums(total.body.factors, -1.0) for total in (numerator, denominators[0].total)):
            raise NearMissFound("the weights are normalized over another axis too")
        bare = _without_causal_mask(denominators[0].total), _without_causal_mask(numerator)
        if aligned(bare[0], bare[1].body, summed) is not None:
            raise NearMissFound(OTHER_KEYS)
        raise NearMissFound(OTHER_WEIGHTS)
    weights = alignment[0]
    value = without(numerator.body, weights)
    if any(is_causal_mask(subject, atom) for atom, _ in value.factors):
        raise NearMissFound(OTHER_KEYS)
    if any(_is_of_positions(subject, atom, {*summed}) for atom, _ in value.factors):
        raise NearMissFound(OTHER_WEIGHTS)
    if not set(summed) <= free(value):
        return None
    return _with_roles(subject, denominators[0], weights, value, summed)


def _without_causal_mask(total: Sum) -> Sum:
    factors = tuple(f for f in total.body.factors if not isinstance(f[0], CausalMask))
    return replace(total, body=replace(total.body, factors=factors))


def _is_of_positions(subject: Subject, atom: Atom, summed: set[Axis]) -> bool:
    """Return whether an atom depends on the two positions, and not on the numbers in the inputs."""
    axes = free(as_product(atom))
    if isinstance(atom, Max) or not (axes & summed and axes & {*subject.axes}):
        return False
    return not depends_on_inputs_within(atom)


@dataclass(frozen=True)
class _Denominator:
    """A sum of weights and a number that is added to it, times a scale."""

    atom: Atom
    total: Sum
    eps: float
    scale: float


def _denominators(formula: Product) -> list[_Denominator]:
    """Return the factors of a formula that divide by a sum, or by a sum and a positive number."""
    found: list[_Denominator] = []
    for atom, power in formula.factors:
        fixed = fixed_sum(as_product(atom)) if power == -1.0 else None
        if fixed is None:
            continue
        total, eps, scale = fixed
        if (eps > 0.0 and scale > 0.0) or isinstance(atom, Sum):
            found.append(_Denominator(atom, total, eps, scale))
    return found


def _with_roles(
    subject: Subject,
    denominator: _Denominator,
    weights: Product,
    value: Product,
    summed: tuple[Axis, ...],
) -> WeightedMean | None:
    formula = subject.formula
    tokens = tuple(axis for axis in subject.axes if axis not in free(value))
    biases, keys = by_dependence(weights, set(tokens))
    causal_masks = [atom for atom, _ in biases.factors if isinstance(atom, CausalMask)]
    biases = Product(tuple(f for f in biases.factors if not isinstance(f[0], CausalMask)))
    _refuse_mixed_logits(biases, value)
    others = [axis for axis in subject.axes if axis not in tokens]
    batch, channels = packed(subject, others)
    if not {*summed, *batch} <= free(keys) <= free(value):
        return None  # attention of another kind: its weights are not of each key
    if any(sums(_argument(f).factors, 1.0) for f in weights.factors):
        return None  # logits that are products of queries and keys
    if not tokens:
        return None  # pooling: one row for all tokens
    refuse_input_weights(keys)
    refuse_clamped(keys)
    refuse_clamped(biases, "the position biases")
    strange = free(biases) - {*summed, *tokens}
    if strange:
        raise NearMissFound("the position bias depends on more than two positions")
    if not same_size(tokens, summed):
        raise NearMissFound("queries and keys are of different sequences")
    check_maxima(subject, [denominator.total])
    outer = tuple(
        (atom, p)
        for atom, p in formula.factors
        if atom is not denominator.atom and not (isinstance(atom, Sum) and p == 1.0)
    )
    scale = float(formula.coefficient * np.exp(formula.exponent)) / denominator.scale
    count = size_of(summed) if all(axis.is_fixed for axis in summed) else 0
    counts = [p for atom, p in outer if isinstance(atom, Count)]
    if counts or (count > 1 and scale * count == 1.0):
        done = "multiplied" if counts and counts[0] > 0.0 else "divided"
        raise NearMissFound(f"the mean is {done} by the number of tokens")
    return WeightedMean(
        subject,
        keys,
        biases,
        value,
        Product(outer),
        summed,
        tokens,
        batch,
        channels,
        bool(causal_masks),
        scale,
        denominator.eps,
    )


def _refuse_mixed_logits(weights: Product, value: Product) -> None:
    """Raise NearMissFound for a function of the sum of key and bias, which does not factor."""
    for atom, _ in weights.factors:
        function = single_atom(atom.argument) if isinstance(atom, Exp) else None
        if isinstance(function, Function) and free(value) <= free(as_product(function)):
            raise NearMissFound(
                f"the logits go through {function.name} once the position bias is added"
            )


def _argument(factor: Factor) -> Product:
    atom = factor[0]
    return atom.argument if isinstance(atom, Exp) else as_product(atom)


def constant_bias(mean: WeightedMean) -> NDArray[np.float64] | None:
    """Return the biases as a constant ``[Tmax, Tmax]``, None if they depend on inputs.

    A graph for any length cuts a corner out of a larger constant, which is returned whole.
    """
    if len(mean.tokens) != 1 or len(mean.summed) != 1:
        return None
    order = (mean.tokens[0], mean.summed[0])
    full = evaluated(mean.biases, order, mean.subject.probed)
    if full is None or full.ndim != 2 or full.shape[0] != full.shape[1]:
        return None
    with np.errstate(divide="ignore"):
        return np.log(full)
