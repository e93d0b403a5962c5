from collections.abc import Callable

import numpy as np
from oracles.mechanisms import softmax

from .cases import Case, error, make_inputs, variant_of
from .portable import every_form

FASTFORMER, CAUSAL = variant_of("Fastformer"), variant_of("CausalFastformer")


@every_form
def test_definition_equals_authors_code(run: Callable) -> None:
    """The authors put heads before tokens and add a mask of -10000 to the logits."""
    inputs = make_inputs(FASTFORMER.operator, Case("authors", 40, (40, 25)))
    exact = {n: x.astype(np.float64) for n, x in inputs.items()}
    heads, width = 2, 4
    mask = np.where(np.arange(40) < inputs["lengths"][:, None], 0, -10000.0)[:, None]

    def transpose_for_scores(x: np.ndarray) -> np.ndarray:
        return x.reshape(2, 40, heads, width).transpose(0, 2, 1, 3)

    query_for_score = (exact["query"] @ exact["alpha_weight"]).transpose(0, 2, 1) / width**0.5
    query_weight = softmax(query_for_score + mask, axis=-1)[:, :, None]
    pooled_query = query_weight @ transpose_for_scores(exact["query"])
    repeated = pooled_query.transpose(0, 2, 1, 3).reshape(2, 1, 8)
    mixed_query_key = exact["key"] * repeated
    key_for_score = (mixed_query_key @ exact["beta_weight"]).transpose(0, 2, 1) / width**0.5
    key_weight = softmax(key_for_score + mask, axis=-1)[:, :, None]
    pooled_key = key_weight @ transpose_for_scores(mixed_query_key)
    weighted_value = pooled_key * transpose_for_scores(exact["value"])
    expected = weighted_value.transpose(0, 2, 1, 3).reshape(2, 40, 8)
    assert error(run(FASTFORMER, inputs), expected, inputs) < 1e-5


@every_form
def test_zero_weights_pool_by_mean(run: Callable) -> None:
    inputs = make_inputs(FASTFORMER.operator, Case("means", 40, (40, 40)))
    inputs["alpha_weight"][:] = 0
    inputs["beta_weight"][:] = 0
    query, key, value = (inputs[n].astype(np.float64) for n in ("query", "key", "value"))
    expected = value * query.mean(1, keepdims=True) * key.mean(1, keepdims=True)
    assert error(run(FASTFORMER, inputs), expected, inputs) < 1e-6
    counts = np.arange(1, 41)[:, None]
    keyed = key * query.cumsum(1) / counts
    expected = value * keyed.cumsum(1) / counts
    assert error(run(CAUSAL, inputs), expected, inputs) < 1e-6


@every_form
def test_head_logits_read_all_channels(run: Callable) -> None:
    """The logits of a head read the channels of every head."""
    inputs = make_inputs(FASTFORMER.operator, Case("whole rows", 40, (40, 25)))
    inputs["alpha_weight"][4:, 0] = 3
    changed = inputs | {"query": inputs["query"].copy()}
    changed["query"][..., 4:] *= -1
    for variant in (FASTFORMER, CAUSAL):
        first_head = run(variant, changed)[0, 30, :4] - run(variant, inputs)[0, 30, :4]
        assert np.abs(first_head).max() > 1e-3


@every_form
def test_first_causal_row_multiplies_three_inputs(run: Callable) -> None:
    inputs = make_inputs(CAUSAL.operator, Case("product", 9, (9, 4)))
    expected = inputs["value"] * inputs["query"] * inputs["key"]
    first = {n: x[:, :1] if x.ndim == 3 else x for n, x in inputs.items()}
    assert error(run(CAUSAL, inputs)[:, :1], expected[:, :1], first) < 1e-6
