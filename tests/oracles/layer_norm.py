"""The layer norm in float64 NumPy."""

import numpy as np
from numpy import ndarray as Array


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    """Ba et al., Layer Normalization, arXiv 1607.06450, eq. 4, with epsilon beside the variance.

    Y = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias      over the channels
    """
    deviation = x - x.mean(-1, keepdims=True)
    return deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + epsilon) * weight + bias
