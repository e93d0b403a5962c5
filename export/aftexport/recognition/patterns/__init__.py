"""A pattern for each mechanism: its formula, and the conditions for a safe rewrite.

Each mechanism has a file of its own, so that its stem finds all there is of it.
"""

from aftexport.recognition.patterns import (
    aft_conv,
    aft_full,
    aft_local,
    aft_simple,
    efficient_attention,
    fastformer,
    linear_attention,
)
from aftexport.recognition.patterns._weighted_mean import constant_bias, weighted_mean
from aftexport.recognition.patterns.pattern import Pattern, Rewrite, Subject


def _match_aft(subject: Subject) -> Rewrite | None:
    """Return AFT-simple, AFT-local or AFT-full, the most special position bias first."""
    mean = weighted_mean(subject)
    if mean is None:
        return None
    bias = constant_bias(mean) if mean.biases.factors else None
    for rewrite in (aft_simple.rewrite, aft_local.rewrite, aft_full.rewrite):
        if (matched := rewrite(mean, bias)) is not None:
            return matched
    return None


PATTERNS: dict[str, Pattern] = {
    "fastformer": fastformer.match,
    "efficient_attention": efficient_attention.match,
    "linear_attention": linear_attention.match,
    "aft_conv": aft_conv.match,
    "aft": _match_aft,
}
"""The patterns in the order of trial; a value matches one at most."""
