"""Random tokens for a model: ids, or features as they are after normalization."""

import numpy as np

from aftexport.bundle.golden import Array


def random_tokens(
    generator: np.random.Generator,
    sizes: tuple[int, ...],
    *,
    vocab_size: int | None,
    num_features: int | None,
) -> Array:
    """Return ids ``[*sizes]`` or, for a model of features, standard normal ``[*sizes, features]``.

    Args:
        generator: the source of the random numbers.
        sizes: the numbers of documents and tokens, or of tokens.
        vocab_size: the number of ids; None for a model of features.
        num_features: the number of features of each token; None for a model of ids.
    """
    if num_features is not None:
        return generator.standard_normal((*sizes, num_features), np.float32)
    assert vocab_size is not None  # a model has ids or features
    return generator.integers(0, vocab_size, sizes, np.int64)
