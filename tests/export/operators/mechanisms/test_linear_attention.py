from collections.abc import Callable

import numpy as np
import pytest
import torch

from .cases import ATTRIBUTES, Case, error, make_inputs, variant_of
from .portable import every_form

ELU = variant_of("NormalizedLinearAttention", feature_map="elu")
RELU = variant_of("NormalizedLinearAttention", feature_map="relu")
CAUSAL = variant_of("CausalNormalizedLinearAttention", feature_map="elu")
CAUSAL_RELU = variant_of("CausalNormalizedLinearAttention", feature_map="relu")


@every_form
def test_values_of_one_give_normalizer_ratio(run: Callable) -> None:
    """The result is the normalizer divided by itself plus eps."""
    inputs = make_inputs(ELU.operator, Case("ones", 6, (6, 6)))
    for name in ("query", "key"):
        inputs[name][:] = 0
    inputs["value"][:] = 1
    width, eps = 4, ATTRIBUTES["eps"]
    assert run(ELU, inputs)[0, 2] == pytest.approx(6 * width / (6 * width + eps), abs=1e-6)
    assert run(CAUSAL, inputs)[0, 2] == pytest.approx(3 * width / (3 * width + eps), abs=1e-6)


@every_form
def test_relu_of_negative_keys_gives_zero(run: Callable) -> None:
    """It does not give NaN."""
    for variant in (RELU, CAUSAL_RELU):
        inputs = make_inputs(variant.operator, Case("dead", 70, (70, 3)))
        inputs["key"] = -np.abs(inputs["key"])
        assert not run(variant, inputs).any()


@pytest.mark.parametrize("variant", [ELU, CAUSAL], ids=str)
def test_very_negative_keys_keep_relative_weights(variant: object) -> None:
    """elu(x) + 1 as written is 0 in float32 below -17; exp(x) is not."""
    inputs = make_inputs(ELU.operator, Case("small", 20, (20,)))
    query, _, value = (torch.from_numpy(inputs[n]) for n in ("query", "key", "value"))
    key = torch.full_like(query, -30)
    result = variant.operator.torch_op(query, key, value, torch.tensor([20]), 2, "elu", 1e-30)
    assert (result[0, -1] - value[0].mean(0)).abs().max() < 1e-5


@every_form
def test_one_token_attends_to_itself(run: Callable) -> None:
    inputs = make_inputs(ELU.operator, Case("itself", 1, (1, 1)))
    for variant in (ELU, CAUSAL):
        assert error(run(variant, inputs), inputs["value"], inputs) < 5 * ATTRIBUTES["eps"]


@every_form
def test_heads_do_not_mix(run: Callable) -> None:
    for variant in (ELU, RELU, CAUSAL, CAUSAL_RELU):
        inputs = make_inputs(variant.operator, Case("heads", 70, (70, 25)))
        own = {n: x[..., :4].copy() if x.ndim == 3 else x for n, x in inputs.items()}
        assert error(run(variant, inputs, 2)[..., :4], run(variant, own, 1), own) < 1e-6
