"""The softmax over labels that exclude each other, and the decision for the largest logit."""

import numpy as np

from aftexport.heads.head import Double


def softmax(logits: Double) -> Double:
    """Return the softmax over the last axis, without overflow for finite logits."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def flips_of_largest(output: Double, expected: Double) -> tuple[int, float | None]:
    """Count rows whose largest logit is another, and measure the smallest lead of the expected one.

    Args:
        output, expected: logits ``[..., width]`` of at least two labels.

    Returns:
        The count and the lead in logits, as ``Head.flips``; no lead for outputs of no rows.
    """
    if not output.size:
        return 0, None
    labels = expected.argmax(-1)
    own = np.take_along_axis(output, labels[..., None], -1)
    others = output.copy()
    np.put_along_axis(others, labels[..., None], -np.inf, -1)
    flips = int((output.argmax(-1) != labels).sum())
    return flips, float((own[..., 0] - others.max(-1)).min())
