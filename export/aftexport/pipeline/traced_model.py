"""A model in ONNX, with the cases of its parity check: random, unusual and extreme inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.bundle.golden import Array, Case, random_tokens
from aftexport.capture.model_spec import InputSpec
from aftexport.lowering.evidence import Explainable
from aftexport.parity.activations import Beyond
from aftexport.recognition.result import Recognition


@dataclass(frozen=True)
class TracedModel:
    """A model in ONNX, with the inputs and results of its parity check.

    Attributes:
        lowered: the model before the encoder is fused.
        model: the model after the encoder is fused.
        evidence: the heads with evidence, or the reason why the graph has none.
        spec: the model's inputs.
        precision: precision of the graph.
        cases: cases of the model and of its operators.
        recognition: result of the recognition; None if models of aftexport's layers have no other
            attention.
        long_case: a case of a 16-bit graph beyond 65,536 tokens, for the export only; None for a
            model of shorter documents.
        beyond: a value that float16 does not hold; None if all fit.
        reference: type in which PyTorch computed the cases.
        why_not_float64: the reason if that type should be float64 but is not; else empty.
        left_out: parameters of the forward for padding that keep their defaults.
        is_of_onnx: whether the source is an ONNX file, whose own outputs are the reference.
        renamed: outputs of such a file with their new names; empty names for those left out.
    """

    lowered: onnx.ModelProto
    model: onnx.ModelProto
    evidence: Explainable | str
    spec: InputSpec
    precision: str
    cases: Sequence[Case]
    recognition: Recognition | None
    reference: str
    why_not_float64: str
    left_out: tuple[str, ...]
    is_of_onnx: bool = False
    long_case: Case | None = None
    beyond: Beyond | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)


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


def case_inputs(spec: InputSpec, order: NDArray[np.int64] | None) -> dict[str, dict[str, Array]]:
    """Return the inputs of the model's cases by name: lengths, batches, padding, extreme tokens.

    ``order`` has the ids from the smallest row of the embedding table to the largest, or is None.
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
        for name, features in _extreme_features(tokens(1, fit(1024))).items():
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
    return cases | _extreme_extras(cases["seven tokens"], spec)


def with_extras(
    inputs: Mapping[str, Array], spec: InputSpec, generator: np.random.Generator
) -> dict[str, Array]:
    """Return the inputs of a batch with random extra inputs, in the order of the model's."""
    documents, tokens = inputs[spec.main].shape[:2]
    drawn = {extra.name: extra.sample(generator, documents, tokens) for extra in spec.extras}
    return spec.in_order({**inputs, **drawn})


def _extreme_extras(inputs: Mapping[str, Array], spec: InputSpec) -> dict[str, dict[str, Array]]:
    """Return a batch with unusual extra inputs, by the name of the case."""
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


def _extreme_features(features: Array) -> dict[str, Array]:
    """Return documents of unusual features ``[1, tokens, features]``, by the name of their case."""
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


def _random_tokens(
    spec: InputSpec, generator: np.random.Generator, sizes: tuple[int, ...]
) -> Array:
    return random_tokens(
        generator, sizes, vocab_size=spec.vocab_size, num_features=spec.num_features
    )
