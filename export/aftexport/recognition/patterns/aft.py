"""The AFT mechanisms, which differ in their position bias: the most special first.

It is apart because each of the three has a file of its own, and one of them imports another.
"""

from aftexport.recognition.patterns import aft_full, aft_local, aft_simple
from aftexport.recognition.patterns._weighted_mean import constant_bias, weighted_mean
from aftexport.recognition.patterns.pattern import Rewrite, Subject


def match(subject: Subject) -> Rewrite | None:
    """Return AFT-simple, AFT-local or AFT-full; see ``Pattern``."""
    mean = weighted_mean(subject)
    if mean is None:
        return None
    bias = constant_bias(mean) if mean.biases.factors else None
    for rewrite in (aft_simple.rewrite, aft_local.rewrite, aft_full.rewrite):
        if (matched := rewrite(mean, bias)) is not None:
            return matched
    return None
