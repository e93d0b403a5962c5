"""The inputs of the parity check's cases of a model."""

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.golden import Array, random_tokens
from aftexport.capture.model_spec import InputSpec
from aftexport.pipeline.token_samples import extreme_extras, extreme_features, with_extras

LONG = 4096
_MANY_IDS, _FEW_IDS = 1 << 24, 1 << 10


def few_tokens(spec: InputSpec) -> dict[str, Array]:
    """Return the inputs of one short document."""
    count = min(7, spec.vocab_size or 7, spec.max_tokens or 7)
    tokens: Array = np.arange(count)[None]
    if spec.num_features is not None:
        tokens = _random_tokens(spec, np.random.default_rng(2), (1, count))
    inputs = {spec.main: tokens, "lengths": np.array([count])}
    return with_extras(inputs, spec, np.random.default_rng(2))


def _random_tokens(
    spec: InputSpec, generator: np.random.Generator, sizes: tuple[int, ...]
) -> Array:
    return random_tokens(
        generator, sizes, vocab_size=spec.vocab_size, num_features=spec.num_features
    )


def case_inputs(spec: InputSpec, order: NDArray[np.int64] | None) -> dict[str, dict[str, Array]]:
    """Return the inputs of the model's cases by name: lengths, batches, padding, extreme tokens.

    Args:
        spec: the model's inputs.
        order: the ids from the smallest row of the embedding table to the largest; None leaves
            the cases of extreme tokens out.
    """
    generator = np.random.default_rng(0)
    rows = _FEW_IDS if order is None else len(order)

    def tokens(*sizes: int) -> Array:
        ids = _random_tokens(spec, generator, sizes)
        if spec.vocab_size is None or spec.vocab_size <= _MANY_IDS:
            return ids
        # A model may clamp ids: then nearly all of so many ids would use the same row.
        few = generator.integers(0, rows, sizes, dtype=np.int64)
        return np.where(generator.random(sizes) < 0.5, ids, few)

    def whole(tokens: Array) -> dict[str, Array]:
        batch, length = tokens.shape[:2]
        return {spec.main: tokens, "lengths": np.full(batch, length, np.int64)}

    def fit(length: int) -> int:
        return min(length, spec.max_tokens or length)

    inputs = {
        "one token": whole(tokens(1, 1)),
        "seven tokens": whole(tokens(2, fit(7))),
        "prime length": whole(tokens(1, fit(509))),
        "long": whole(tokens(1, fit(LONG))),
    }
    if "lengths" in spec.names:
        width = fit(257)
        lengths = np.maximum([width, width // 2, 1, width - 1], 1).astype(np.int64)
        inputs["padded batch"] = {spec.main: tokens(4, width), "lengths": lengths}
    if spec.num_features is not None:
        for name, features in extreme_features(tokens(1, fit(1024))).items():
            inputs[name] = whole(features)
    if order is not None:
        width = fit(1024)
        inputs["largest token repeated"] = whole(np.full((1, width), order[-1], np.int64))
        pattern = np.resize(np.concatenate([order[:8], order[-8:]]), (1, width))
        inputs["extreme tokens"] = whole(pattern.astype(np.int64))
    # In some of these cases, x[:, 1:], x[:, 2:] and x[:, ::2] have no token or one token.
    for number, batch in {"two": 2, "three": 3}.items():
        for length in range(1, fit(3) + 1):
            inputs[f"{number} documents of {length}"] = whole(tokens(batch, length))
    cases = {name: with_extras(case, spec, generator) for name, case in inputs.items()}
    return cases | extreme_extras(cases["seven tokens"], spec)
