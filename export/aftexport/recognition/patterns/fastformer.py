"""The pattern of Fastformer's additive attention; the second pooling is of P, not of K:

    g[b,h,d] = sum_u softmax_u(Q Wa + m)[b,u,h] Q[b,u,h,d];  P[b,t,h,d] = K[b,t,h,d] g[b,h,d]
    V[b,t,h,d] * sum_u softmax_u(P Wb + m)[b,u,h] P[b,u,h,d]

The operator has no mask m. A mask is passed in one additional head: in a channel of the query that
every logit reads, and in a channel of the key that meets a query of 1. The copies of query and key
take about as long as the operator saves, and longer if a document exceeds the caches.

A condition that leaves tokens out becomes a number that is added to the logits:

    where(m, x, -1e9)  ->  x - 1e30 (1 - m)          exp(x) m  ->  exp(x - 1e30 (1 - m))

The number is so low that logits round to it. If a document has no token that counts, all its tokens
have the same weight, as where one number replaces their logits.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition import algebra
from aftexport.recognition.algebra import free, key, multiply, negation, substitute
from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.patterns.channels import check_tokens, heads_of
from aftexport.recognition.patterns.pattern import (
    LOWEST,
    NearMissFound,
    Operand,
    Rewrite,
    Subject,
    aligned,
    are_conditions,
    check_maxima,
    is_condition,
    leaves,
    logits_of,
    same_size,
    size_of,
    sums,
    within,
    without,
    zeroed,
)
from aftexport.recognition.terms import (
    ONE,
    Axis,
    Exp,
    Function,
    Leaf,
    Plus,
    Product,
    Sum,
    Unreadable,
    as_product,
    flat,
    number,
    single_atom,
)


@dataclass(frozen=True)
class _Pooling:
    """A softmax over tokens of ``logits``, which pools factors."""

    logits: Product
    mask: Product  # conditions that multiply the exponentials, as a fill of logits with -inf does
    kept: Product  # the conditions that multiply the softmax, as a fill of weights with 0 does
    pooled: Product
    summed: Axis  # the axis of the tokens
    formula: Product
    total: Sum


@dataclass(frozen=True)
class _Logits:
    """``scale * x weight + mask``: ``weight`` is ``[heads and channels, heads]``."""

    weight: NDArray[np.float64]
    mask: Product
    opened: ir.Value


def match(subject: Subject) -> Rewrite | None:
    """Return Fastformer; see ``Pattern``."""
    poolings = _poolings(subject)
    if len(poolings) == 1:
        _refuse_pooled_keys(subject, poolings[0])
    if len(poolings) != 2:
        return None
    axes = subject.axes
    outside = tuple((a, p) for a, p in subject.formula.factors if not isinstance(a, Sum))
    value = Product(outside, subject.formula.coefficient)
    tokens = tuple(a for a in axes if all(a not in free(p.pooled) for p in poolings))
    heads = [a for a in axes if all(a in free(p.logits) for p in poolings)]
    channels = tuple(a for a in axes if a not in heads and a not in tokens)
    if not outside or not tokens or not channels:
        return None
    batch, heads_only = heads_of(subject, tuple(heads))
    # The logits of the first pooling are a function of the factors that it pools.
    for first in poolings:
        alpha = _logits(subject, first, first.pooled, heads_only, channels)
        if alpha is not None:
            break
    else:
        raise NearMissFound("the logits of neither pooling are a linear layer of the pooled tensor")
    second = next(pooling for pooling in poolings if pooling is not first)
    beta = _logits(subject, second, multiply(second.pooled, first.formula), heads_only, channels)
    if not all(are_conditions(pooling.mask) for pooling in poolings):
        raise NearMissFound("the weights of tokens are multiplied by a tensor that is not a mask")
    if beta is None:
        raise NearMissFound("the second logits are not of keys times the pooled query")
    if not (_are_left_out(first.kept, alpha) and _are_left_out(second.kept, beta)):
        raise NearMissFound("tokens are left out of a pooling, and not of its softmax")
    if not all(same_size(tokens, (p.summed,)) for p in poolings):
        raise NearMissFound("queries and keys are of different sequences")
    check_maxima(subject, [p.total for p in poolings])
    check_tokens(subject, tokens, (first.summed,), first.pooled)
    return _rewrite(
        subject, value, first, second, alpha, beta, (batch, tokens, heads_only, channels)
    )


def _rewrite(
    subject: Subject,
    value: Product,
    first: _Pooling,
    second: _Pooling,
    alpha: _Logits,
    beta: _Logits,
    roles: tuple[tuple[Axis, ...], ...],
) -> Rewrite:
    batch, tokens, heads, channels = roles
    num_heads, width = size_of(heads), size_of(channels)
    beside: list[tuple[Product, ...]] = [(), (), ()]
    weights = [alpha.weight, beta.weight]
    masked = bool(alpha.mask.factors or beta.mask.factors)
    if masked:
        if width < 2:
            raise NearMissFound("there is a mask, and heads of one channel have no room for it")
        beside = [(alpha.mask, ONE), (number(0.0), beta.mask), ()]
        weights = [_with_head(w, width, row) for w, row in zip(weights, (0, 1), strict=True)]
    scale = np.sqrt(width)
    packed_channels = (*heads, *channels)
    # Where no token counts all have the same weight, and the sum of keys that are 0 is 0.
    reader = subject.reader
    pooled = zeroed(multiply(first.pooled, first.kept), first.mask, reader)
    keys = zeroed(multiply(second.pooled, second.kept), second.mask, reader)
    if within(substitute(without(pooled, first.pooled), {first.summed: second.summed}), keys):
        pooled = first.pooled  # its sum is multiplied by keys that are 0
    query = Operand(pooled, (batch, (first.summed,), packed_channels), beside=beside[0])
    values = Operand(value, (batch, tokens, packed_channels), beside=beside[2])
    if len(tokens) == 1 and key(substitute(value, {tokens[0]: first.summed})) == key(pooled):
        values = query  # as in the paper; the additional head does not matter
    return Rewrite(
        "fastformer",
        "Fastformer",
        [
            query,
            Operand(keys, (batch, (second.summed,), packed_channels), beside=beside[1]),
            values,
            *(w * scale for w in weights),
        ],
        (batch, tokens, packed_channels),
        {"num_heads": num_heads + masked},
        opened=(alpha.opened, beta.opened),
        extra_head=masked,
    )


def _with_head(weight: NDArray[np.float64], width: int, row: int) -> NDArray[np.float64]:
    """Return weights with an additional head, one channel of which adds to all other logits."""
    channels, heads = weight.shape
    wide = np.zeros((channels + width, heads + 1))
    wide[:channels, :heads] = weight
    wide[channels + row, :heads] = 1.0
    return wide


def _poolings(subject: Subject) -> list[_Pooling]:
    factors = subject.formula.factors
    numerators, denominators = sums(factors, 1.0), sums(factors, -1.0)
    if len(numerators) != len(denominators) or not 1 <= len(numerators) <= 2:
        return []
    poolings = []
    for numerator in numerators:
        bound = flat(numerator.axes)
        if len(bound) != 1:
            return []
        for total in denominators:
            part = aligned(total, numerator.body, bound)
            if part is not None:
                formula = multiply(as_product(numerator), Product(((total, -1.0),)))
                rest = without(numerator.body, part[0])
                kept = Product(tuple(f for f in rest.factors if is_condition(f[0])))
                pooled = without(rest, kept)
                weights = tuple(f for f in part[0].factors if not isinstance(f[0], Exp))
                mask = Product(weights)
                poolings.append(
                    _Pooling(logits_of(part[0]), mask, kept, pooled, bound[0], formula, total)
                )
    return poolings if len(poolings) == len(numerators) else []


def _are_left_out(kept: Product, logits: _Logits) -> bool:
    """Return whether the mask of logits leaves out the tokens that conditions do."""
    mask = single_atom(Product(logits.mask.factors))
    terms = mask.terms if isinstance(mask, Plus) else (logits.mask,)
    names = {key(Product(term.factors)) for term in terms if term.coefficient <= MAX_FILL}
    return all(key(negation(as_product(atom))) in names for atom, _ in kept.factors)


def _refuse_pooled_keys(subject: Subject, pooling: _Pooling) -> None:
    """Raise NearMissFound if logits are of keys times a pooled query, but keys are pooled."""
    for value in leaves(pooling.logits):
        reader = subject.reader.blank_copy()
        formula = reader.read(value, reader.new_dims(value), through_linear=True)
        for total in _totals(formula):
            if sums(total.body.factors, -1.0) and len(subject.formula.factors) > 2:
                raise NearMissFound("the second pooling is of other keys than its logits")


def _totals(formula: Product) -> list[Sum]:
    atom = single_atom(formula)
    terms = atom.terms if isinstance(atom, Plus) else (formula,)
    return [total for term in terms for total in sums(term.factors, 1.0)]


def _logits(
    subject: Subject,
    pooling: _Pooling,
    expected: Product,
    heads: tuple[Axis, ...],
    channels: tuple[Axis, ...],
) -> _Logits | None:
    """Return logits as weight and mask, None if they are not a linear layer of ``expected``."""
    terms = additive_terms(subject, pooling.logits, pooling.mask)
    for term in terms:
        if len(term.factors) != 1 or not isinstance(term.factors[0][0], Leaf):
            continue
        leaf, scale = term.factors[0][0], term.coefficient
        weight = _weight(subject, leaf, pooling.summed, expected, heads, channels)
        if weight is None:
            continue
        mask = algebra.add(t for t in terms if t is not term)
        if mask.factors and free(mask) & {*heads, *channels}:
            raise NearMissFound("the mask differs from head to head")
        return _Logits(scale * weight, mask if mask.factors else Product(), leaf.value)
    return None


def _weight(
    subject: Subject,
    leaf: Leaf,
    summed: Axis,
    expected: Product,
    heads: tuple[Axis, ...],
    channels: tuple[Axis, ...],
) -> NDArray[np.float64] | None:
    reader = subject.reader.blank_copy()
    formula = reader.read(leaf.value, leaf.dims, through_linear=True)
    inner = single_atom(formula)
    terms = inner.terms if isinstance(inner, Plus) else (formula,)
    products = [t for t in terms if sums(t.factors, 1.0) and len(t.factors) == 1]
    # A bias adds one number to the logits of all tokens, which cancels in the softmax.
    if len(products) != 1 or any(summed in free(t) for t in terms if t is not products[0]):
        return None
    total = products[0].factors[0][0]
    assert isinstance(total, Sum)
    for weight, _ in total.body.factors:
        array = subject.probed.constant(getattr(weight, "value", None))
        if not isinstance(weight, Leaf) or array is None:
            continue
        axes = _same_input(total, weight, expected, heads, channels)
        if axes is not None:
            matrix = _matrix(weight, array, axes, heads)
            subject.reader.ends |= reader.ends
            return products[0].coefficient * matrix
    return None


def _same_input(
    total: Sum, weight: Leaf, expected: Product, heads: tuple[Axis, ...], channels: tuple[Axis, ...]
) -> tuple[Axis, ...] | None:
    """Return the axes of ``weight`` for those of ``expected``, None if it multiplies others."""
    outputs = {*heads} & free(as_product(weight))
    inputs = tuple(a for dim in weight.dims for a in flat(dim) if a not in outputs)
    for own in ((*heads, *channels), channels):
        if (
            len(inputs) == 1
            and len(own) > 1
            and inputs[0].sizes == (size_of(own),) * len(inputs[0].sizes)
        ):
            inputs[0].parts = tuple(Axis(a.sizes) for a in own)
            inputs = inputs[0].parts
        if [a.sizes for a in inputs] != [a.sizes for a in own]:
            continue
        renamed = substitute(expected, dict(zip(own, inputs, strict=True)))
        if key(algebra.sum_over(inputs, multiply(renamed, as_product(weight)))) == key(
            as_product(total)
        ):
            return inputs
    return None


def _matrix(
    weight: Leaf, array: NDArray[np.generic], inputs: tuple[Axis, ...], heads: tuple[Axis, ...]
) -> NDArray[np.float64]:
    """Return ``[heads and channels, heads]``, block-diagonal for a weight that heads share."""
    order = [a for dim in weight.dims for a in flat(dim)]
    if array.size != size_of(order):
        raise Unreadable("a weight has another size than its axes")
    array = array.astype(np.float64).reshape([a.sizes[0] for a in order])
    outputs = [a for a in order if a not in inputs]
    array = array.transpose([order.index(a) for a in (*inputs, *outputs)])
    rows, columns = size_of(inputs), size_of(outputs)
    matrix: NDArray[np.float64] = array.reshape(rows, columns)
    if outputs or not heads:
        return matrix
    return np.asarray(np.kron(np.eye(size_of(heads)), matrix), np.float64)


MAX_FILL = -1e4
"""The highest number that leaves a token out, as a fill of logits or the factor of a mask."""


def additive_terms(subject: Subject, logits: Product, mask: Product) -> tuple[Product, ...]:
    """Return the terms of logits, with the masks of their exponentials as further terms."""
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
    for fill, kept, left_out in ((first, second, condition), (second, first, negation(condition))):
        if not fill.factors and fill.coefficient <= MAX_FILL and kept.factors:
            return kept, left_out
    return None


def _limited(term: Product, lowest: float) -> Product:
    """Return a term whose coefficient is clipped to ``lowest`` and its negative."""
    return Product(term.factors, float(np.clip(term.coefficient, lowest, -lowest)), term.exponent)


def _is_half(logits: Product, probed: ProbedGraph) -> bool:
    return any(probed.has(value) and probed.dtype(value) == np.float16 for value in leaves(logits))
