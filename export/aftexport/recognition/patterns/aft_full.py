"""The pattern of AFT-full:

gate(Q[b,t,c]) * sum_u exp(K[b,u,c] + w[t,u]) V[b,u,c] / sum_u exp(K[b,u,c] + w[t,u])
"""

import numpy as np
from numpy.typing import NDArray

from aftexport.recognition.patterns._weighted_mean import WeightedMean
from aftexport.recognition.patterns.pattern import (
    LOWEST,
    Operand,
    Rewrite,
    holds_infinity,
    logits_of,
    without,
)
from aftexport.recognition.terms import Exp, Product, number


def rewrite(mean: WeightedMean, bias: NDArray[np.float64] | None) -> Rewrite | None:
    """Return the operator for a mean with any position bias; ``bias`` is None if computed."""
    gating = mean.gating
    if gating is None or not mean.biases.factors:
        return None
    operand: Operand | NDArray[np.float64]
    causal = mean.causal
    if bias is not None:
        causal |= is_causal(bias)
        operand = np.maximum(np.tril(bias) if causal else bias, LOWEST)
    else:
        exponentials = Product(tuple(f for f in mean.biases.factors if isinstance(f[0], Exp)))
        logits = logits_of(exponentials)
        operand = Operand(
            logits,
            (mean.tokens, mean.summed),
            without(mean.biases, exponentials),
            holds_infinity(logits, mean.subject.probed),
        )
    return Rewrite(
        "aft_full",
        "CausalAftFull" if causal else "AftFull",
        [gating[1], mean.spread_key_operand, mean.value_operand, operand],
        mean.groups(mean.tokens),
        {"gate": gating[0], "eps": mean.eps, "precision": "fp32"},
        outside=number(mean.scale),
    )


def is_causal(bias: NDArray[np.float64]) -> bool:
    """Return whether a bias leaves out every key after the query, and no other."""
    upper = np.triu(np.ones_like(bias, dtype=bool), 1)
    return bool(upper.any() and (bias[upper] < LOWEST).all() and (bias[~upper] > LOWEST).all())
