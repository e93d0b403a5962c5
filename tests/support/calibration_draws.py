"""Draws of labelled documents whose posteriors are known."""

import numpy as np
from numpy.typing import NDArray

from aftexport.calibration.fit import Sample
from aftexport.heads import (
    BinaryClassification,
    Head,
    MultiLabelClassification,
    SingleLabelClassification,
)

Double = NDArray[np.float64]
ONE_LABEL = SingleLabelClassification(labels=("a", "b", "c"))
TWO_LABELS = BinaryClassification(labels=("no", "yes"), threshold=0.4)
ANY_LABELS = MultiLabelClassification(labels=("a", "b", "c"), thresholds=(0.5, 0.3, 0.6))


def draw(
    generator: np.random.Generator,
    head: Head,
    count: int,
    *,
    log_temperature: float = 0.0,
    slope: float = 0.0,
    bias: float = 0.0,
    spread: float = 2.5,
) -> tuple[Sample, Double]:
    """Return documents of 16 to 65,536 tokens, and the posterior of each name.

    A temperature of ``exp(log_temperature + slope * log2(tokens))`` and a bias give the posterior.
    """
    tokens = np.exp2(generator.uniform(4, 16, count)).astype(np.int64)
    posterior_logits = generator.normal(0, spread, (count, head.width))
    temperature = np.exp(log_temperature + slope * np.log2(tokens))[:, None]
    posterior = head.scores(posterior_logits)
    logits = (posterior_logits - bias) * temperature
    if isinstance(head, MultiLabelClassification):
        truths = (generator.random(posterior.shape) < posterior).astype(np.int64)
    else:
        cumulative = posterior.cumsum(1)[:, :-1]
        truths = (cumulative < generator.random((count, 1))).sum(1)
    return Sample(head, logits, tokens, truths), posterior
