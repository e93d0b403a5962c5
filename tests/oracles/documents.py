"""Random documents for the tests of the formulas."""

import numpy as np
from numpy import ndarray as Array

TOKENS, CHANNELS, HEADS, WINDOW = 6, 4, 2, 2
FURTHER = {
    "aft_full": {"position_bias": (TOKENS + 2, TOKENS + 2)},
    "aft_local": {"band": (TOKENS, 2 * WINDOW - 1)},
    "aft_conv": {"filter": (HEADS, WINDOW + 1)},
    "fastformer": {"alpha_weight": (CHANNELS, HEADS), "beta_weight": (CHANNELS, HEADS)},
}
"""Shapes of the tensors besides query, key and value."""


def random_inputs(stem: str, lengths: list[int], *, causal: bool = False) -> dict[str, Array]:
    random = np.random.default_rng(0)
    shapes = dict.fromkeys(("query", "key", "value"), (len(lengths), TOKENS, CHANNELS))
    if stem == "aft_conv":
        shapes["key"] = (len(lengths), TOKENS, HEADS)
    shapes |= FURTHER.get(stem, {})
    if stem == "aft_local" and causal:
        shapes["band"] = (TOKENS, WINDOW)
    inputs = {name: random.normal(size=shape) for name, shape in shapes.items()}
    return inputs | {"lengths": np.array(lengths)}


def attributes_of(stem: str) -> dict[str, int]:
    return {} if stem in ("aft_full", "aft_local", "aft_simple") else {"num_heads": HEADS}
