"""Random tokens of the cases of a model: ids, or features as they are after normalization."""

import numpy as np

from aftexport.bundle.golden import Array
from aftexport.capture.input_spec import InputSpec


def sample_tokens(spec: InputSpec, generator: np.random.Generator, sizes: tuple[int, ...]) -> Array:
    """Return tokens ``[*sizes]`` or, for a model of features, ``[*sizes, features]``.

    Args:
        spec: the model's inputs.
        generator: the source of the random numbers.
        sizes: the numbers of documents and tokens.
    """
    if spec.num_features is not None:
        return generator.standard_normal((*sizes, spec.num_features), np.float32)
    assert spec.vocab_size is not None  # a model has ids or features
    return generator.integers(0, spec.vocab_size, sizes, dtype=np.int64)


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
