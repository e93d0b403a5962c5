"""The logistic function, and its inverse."""

import numpy as np

from aftexport.heads.head import Double


def sigmoid(logits: Double) -> Double:
    """Return ``1 / (1 + exp(-x))`` without overflow, for any finite x."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


def logit(probability: Double) -> Double:
    """Return the number whose sigmoid is the probability, between 0 and 1."""
    return np.log(probability) - np.log1p(-probability)
