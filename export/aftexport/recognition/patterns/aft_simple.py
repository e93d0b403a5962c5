"""The pattern of AFT-simple; a mean without a gate is pooling and is not rewritten:

gate(Q[b,t,c]) * sum_u softmax_u(K[b,u,c]) V[b,u,c]
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aftexport.recognition.algebra import free
from aftexport.recognition.patterns._weighted_mean import WeightedMean
from aftexport.recognition.patterns.channels import check_tokens
from aftexport.recognition.patterns.evaluation import NO_GATE
from aftexport.recognition.patterns.pattern import LOWEST, NearMissFound, Rewrite, size_of
from aftexport.recognition.terms import number


def rewrite(mean: WeightedMean, bias: NDArray[np.float64] | None) -> Rewrite | None:
    """Return the operator for a mean whose weights depend only on keys."""
    causal = mean.causal
    if mean.biases.factors:
        if bias is None or not _only_leaves_out(bias):
            return None
        causal |= bool((bias < LOWEST).any())
        if mean.eps and bias[0, 0] != 0.0:
            return None  # eps is added to weights that are scaled by the bias
    mean, num_heads = _by_head(mean)
    check_tokens(mean.subject, mean.tokens, mean.summed, mean.keys)
    gating = mean.gating
    if gating is None:
        raise NearMissFound(NO_GATE)
    if gating[0] == "none" and not causal:
        return None
    return Rewrite(
        "aft_simple",
        "CausalAftSimple" if causal else "AftSimple",
        [gating[1], mean.key_operand, mean.value_operand],
        mean.groups(mean.tokens),
        {"gate": gating[0], "num_heads": num_heads, "eps": mean.eps},
        outside=number(mean.scale),
    )


def _by_head(mean: WeightedMean) -> tuple[WeightedMean, int]:
    """Return a mean whose channels begin with those of the key, and their number if others follow.

    Channels of a head may share a key. The number is 0 if each channel has its own.
    """
    own = tuple(axis for axis in mean.channels if axis in free(mean.keys))
    others = tuple(axis for axis in mean.channels if axis not in own)
    return replace(mean, channels=(*own, *others)), size_of(own) if others else 0


def _only_leaves_out(bias: NDArray[np.float64]) -> bool:
    """Return whether rows are constant, apart from keys after the query in all rows or none."""
    lower = np.tril(np.ones_like(bias, dtype=bool))
    left_out = bias < LOWEST
    if left_out.any() and not np.array_equal(left_out, ~lower):
        return False
    return all(np.ptp(row[~out]) == 0.0 for row, out in zip(bias, left_out, strict=True))
