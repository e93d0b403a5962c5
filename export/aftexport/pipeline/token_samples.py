"""Documents of unusual features, for the cases of a model."""

import numpy as np

from aftexport.bundle.golden import Array


def extreme_features(features: Array) -> dict[str, Array]:
    """Return documents of unusual features, by the name of their case.

    Args:
        features: standard normal features, float32 ``[1, tokens, features]``.
    """
    values = np.asarray(features, np.float32)
    places = np.arange(values.shape[1])
    only_one = np.zeros_like(values)
    only_one[0, places, places % values.shape[2]] = 1
    scales = np.float32(2) ** (places % 9 - 4)
    return {
        "large features": values * np.float32(10),
        "small features": values * np.float32(0.01),
        "features of mixed scale": values * scales[:, None].astype(np.float32),
        "one feature in each token": only_one,
        "zero features": np.zeros_like(values),
        "equal tokens": np.repeat(values[:, :1], values.shape[1], 1),
    }
