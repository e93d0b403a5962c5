"""Linear attention, by its formula, with or without eps; causal, sums run up to u = t:

sum_du phi(Q[b,t,h,d]) phi(K[b,u,h,d]) V[b,u,h,e] / (sum_du phi(Q[b,t,h,d]) phi(K[b,u,h,d]) + eps)
"""

import numpy as np

from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.recognition.formula.algebra import free
from aftexport.recognition.formula.axes import Axis, flat
from aftexport.recognition.formula.terms import (
    Atom,
    CausalMask,
    Exp,
    Function,
    Indicator,
    Leaf,
    Plus,
    Product,
    Sum,
    as_product,
    number,
)
from aftexport.recognition.patterns._constants import whole
from aftexport.recognition.patterns._roles import roles_of
from aftexport.recognition.patterns._token_axes import check_tokens
from aftexport.recognition.patterns.elementwise import Elementwise, classified
from aftexport.recognition.patterns.pattern import (
    Factor,
    NearMissFound,
    Operand,
    Rewrite,
    Subject,
    aligned,
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
"""Below it elu(x) + 1, as it is written, has lost five digits of exp(x) in float64 or more."""
_SMALL_EPS = (
    f"eps is {{:g}} in the graph; {MIN_EPS:g}, the smallest that is safe in float32, is written."
    " Where the normalizer is 0 the result is 0, and was NaN if eps was 0"
)


def match(subject: Subject) -> Rewrite | None:
    """See ``Pattern``."""
    formula = subject.formula
    _refuse_other_parts(subject)
    numerators = sums(formula.factors, 1.0)
    if len(numerators) != 1 or len(formula.factors) != 2:
        return None
    body, bound = numerators[0].body, flat(numerators[0].axes)
    below = next(((a, p) for a, p in formula.factors if a is not numerators[0]), None)
    if below is None or below[1] != -1.0 or len(bound) < 2:
        return None
    denominator = fixed_sum(as_product(below[0]))
    if denominator is None:
        _refuse_masked_denominator(below[0])
        refuse_changed_denominator(formula.factors)
        return None
    total, eps, scale = denominator
    found = aligned(total, body, bound)
    if found is None:
        _refuse_changed_keys(total)
        raise NearMissFound("numerator and denominator have different weights")
    weights, value = found[0], without(body, found[0])
    if formula.coefficient == 1.0 != scale:
        raise NearMissFound("the denominator is scaled, and the numerator is not")
    return _with_roles(subject, bound, weights, value, eps, formula.coefficient / scale)


def _with_roles(
    subject: Subject,
    bound: tuple[Axis, ...],
    weights: Product,
    value: Product,
    eps: float,
    scale: float,
) -> Rewrite | None:
    causal_masks = [
        a for a, _ in weights.factors if isinstance(a, CausalMask) or _is_lower(subject, a)
    ]
    if any(isinstance(a, CausalMask) or _is_lower(subject, a) for a, _ in value.factors):
        raise NearMissFound("numerator and denominator are sums over different keys")
    features = Product(tuple(f for f in weights.factors if f[0] not in causal_masks))
    summed = tuple(a for a in bound if a in free(value))
    channels = [a for a in bound if a not in free(value)]
    if not summed or not channels or len(features.factors) < 2:
        return None
    key_factors = [f for f in features.factors if set(summed) & free(as_product(f[0]))]
    query_factors = [f for f in features.factors if f not in key_factors]
    if any(isinstance(atom, Exp) for atom, _ in features.factors):
        return None  # softmax features are other mechanisms
    positions = set(subject.axes) - free(value)
    if any(free(as_product(f[0])) & positions for f in key_factors):
        raise NearMissFound("the scores' mask is not known to be of the keys after the query")
    key = Product(tuple(key_factors))
    query = Product(tuple(query_factors))
    roles = roles_of(subject, query, key, value, channels, summed)
    if roles is None:
        return None
    tokens, heads, batch, wide = roles
    mask = Product(tuple(f for f in key.factors if not free(as_product(f[0])) & {*channels}))
    refuse_input_weights(mask)
    key = without(key, mask)
    if len(query.factors) != 1 or len(key.factors) != 1:
        raise NearMissFound("the features are multiplied by something else than a mask of keys")
    mapped = [_features(subject, product) for product in (query, key)]
    if mapped[0] is None or mapped[1] is None or mapped[0][0] != mapped[1][0]:
        raise NearMissFound("the feature map is neither elu(x) + 1 nor relu(x)")
    check_tokens(subject, tokens, summed, mapped[1][1], channels)
    if eps < 0.0:
        raise NearMissFound(f"{eps:.3g} is added to the denominator, and eps is 0 or more")
    return Rewrite(
        "linear_attention",
        "CausalNormalizedLinearAttention" if causal_masks else "NormalizedLinearAttention",
        [
            Operand(mapped[0][1], (batch, tokens, (*heads, *channels))),
            # Of what a mask leaves out the logarithm is below all that has features above 0.
            Operand(mapped[1][1], (batch, summed, (*heads, *channels)), mask),
            Operand(value, (batch, summed, (*heads, *wide))),
        ],
        (batch, tokens, (*heads, *wide)),
        {"num_heads": size_of(heads), "feature_map": mapped[0][0], "eps": max(eps, MIN_EPS)},
        lowest={
            v: _LOWEST
            for _, formula in (mapped[0], mapped[1])
            for v in leaves(formula)
            if subject.probed.is_float(v)
        },
        outside=number(scale),
        proven={"eps": eps},
        # As float32 has it, the smallest is a little below.
        note="" if eps >= np.float32(MIN_EPS) else _SMALL_EPS.format(eps),
    )


def _refuse_changed_keys(total: Sum) -> None:
    """Raises NearMissFound where numbers are added to the sum of the keys that queries read."""
    for atom, _ in total.body.factors:
        terms = atom.terms if isinstance(atom, Plus) else ()
        constants = [term.coefficient for term in terms if not term.factors]
        if constants and any(sums(term.factors, 1.0) for term in terms):
            raise NearMissFound(
                f"{constants[0]:.3g} is added to the sum of the keys before queries multiply it:"
                " add it to the denominator"
            )


def _refuse_masked_denominator(atom: Atom) -> None:
    """Raises NearMissFound where a sum below is multiplied by something before eps is added."""
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


def _refuse_other_parts(subject: Subject) -> None:
    """Raises NearMissFound where what divides is a part of such a product, but of which values?"""
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


def _features(subject: Subject, product: Product) -> tuple[str, Product] | None:
    factor: Factor | None = single(product)
    return classified(subject, factor, FEATURE_MAPS) if factor is not None else None


def _is_lower(subject: Subject, atom: Atom) -> bool:
    """Whether an atom is a constant of ones up to the diagonal and zeros after it."""
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
