"""Random and unusual extra inputs, and unusual features, for the cases of a model."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.golden import Array
from aftexport.capture.model_spec import InputSpec


def with_extras(
    inputs: Mapping[str, Array], spec: InputSpec, generator: np.random.Generator
) -> dict[str, Array]:
    """Return the inputs of a batch with random extra inputs, in the order of the model's."""
    documents, tokens = inputs[spec.main].shape[:2]
    drawn = {extra.name: extra.sample(generator, documents, tokens) for extra in spec.extras}
    return _in_order({**inputs, **drawn}, spec)


def extreme_extras(inputs: Mapping[str, Array], spec: InputSpec) -> dict[str, dict[str, Array]]:
    """Return a batch with unusual extra inputs, by the name of the case.

    Args:
        inputs: the inputs of a batch, with random extra inputs.
        spec: the model's inputs.
    """
    largest, zero = dict(inputs), dict(inputs)
    for extra in spec.extras:
        values: NDArray[Any] = inputs[extra.name]
        largest[extra.name] = np.full_like(values, extra.maximum or 0)
        zero[extra.name] = np.zeros_like(values)
        if extra.dtype == "float32":
            large = values * np.float32(10) if extra.highest is None else extra.highest
            largest[extra.name] = extra.clipped(np.broadcast_to(large, values.shape))
            least = np.broadcast_to(extra.lowest or 0.0, values.shape)
            zero[extra.name] = extra.clipped(least)
    return {"largest extra inputs": largest, "extra inputs of 0": zero} if spec.extras else {}


def _in_order(inputs: Mapping[str, Array], spec: InputSpec) -> dict[str, Array]:
    return {name: inputs[name] for name in spec.names}


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
