"""Layers that resemble a mechanism stay unchanged, and the near miss names the condition."""

from typing import Any

import numpy as np
import pytest

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.recognition.patterns.pattern import DIVIDE_BY_SUM

from . import look_alikes
from .graphs import BATCH, TOKENS, assert_equal, fused, operators, scripted
from .layer import example

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:Constant folding",
    "ignore:Using padding='same'",
)
LOOK_ALIKES = look_alikes.layers()
OF_LONG_DOCUMENTS = look_alikes.of_long_documents()


@pytest.mark.table(keep=0.2, by=lambda name, axes: name)
@pytest.mark.parametrize("axes", [(BATCH, TOKENS), ()], ids=["any size", "one size"])
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_left_alone(name: str, axes: Any) -> None:
    """The product of features and values in some is the operator's, and all else stays."""
    layer = LOOK_ALIKES[name]
    found, model = fused(scripted(layer, example(), axes=axes))
    assert not found.unexamined
    if axes and name in look_alikes.SOFTMAX_ATTENTION:
        assert operators(found) == ["SoftmaxAttention"]
        assert_equal(layer, model, example())
        return
    assert bool(operators(found)) == (name in look_alikes.PRODUCTS)
    if name not in look_alikes.PRODUCTS:
        assert bool(found.near_misses) != bool(found.absence), "one reason, and no other"
        return
    for match in found.matches:
        assert match.operator.removeprefix("Causal") == "NormalizedLinearAttention"
        assert match.attributes["normalizer"] == "none"
        assert match.note
    assert layer(example()).isfinite().all() == (name != look_alikes.NOT_FINITE)
    if name != look_alikes.NOT_FINITE:
        assert_equal(layer, model, example())


@pytest.mark.parametrize("name", look_alikes.of_longer_documents())
def test_effect_of_longer_documents_prevents_fusion(name: str) -> None:
    """The effect shows only in documents longer than were tried."""
    found, _ = fused(scripted(look_alikes.of_longer_documents()[name], example()))
    assert operators(found) == []
    assert "documents longer than were tried" in found.near_misses[0].reason


@pytest.mark.parametrize("name", ["simple_greatest_value", "mean_of_tokens"])
def test_no_weighted_sum_is_said(name: str) -> None:
    found, _ = fused(scripted(LOOK_ALIKES[name], example()))
    assert (found.near_misses, found.absence) == ([], "there is no weighted sum over tokens")


@pytest.mark.parametrize("name", OF_LONG_DOCUMENTS)
def test_fusion_keeps_effect_of_long_documents(name: str) -> None:
    original = scripted(OF_LONG_DOCUMENTS[name], example())
    _, model = fused(original)
    x = {"x": example(76).numpy()}
    expected, output = (
        next(iter(OnnxRuntimeEngine(m.SerializeToString(), fused=False).run(x).values()))
        for m in (original, model)
    )
    np.testing.assert_allclose(output, expected, atol=1e-5)


@pytest.mark.table(keep=0.5, by=lambda name, reason: name.partition("_")[0])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("simple_all_over_channels", "over the channels"),
        ("simple_over_the_batch", "may be the batch"),
        ("simple_maximum_over_the_batch", "maximum"),
        ("simple_clamped_keys", "clamped"),
        ("linear_padded_with_a_half", "scaled"),
        ("linear_padded_in_front", "not known to be of a column of ones after the values"),
        ("linear_padded_as_the_last_key", "not known to be of a column of ones after the values"),
        ("linear_padded_column_before_taken", "of a column of ones after the values"),
        ("linear_padded_clamped", "goes through Clip"),
        ("linear_padded_two_columns_taken", "different weights"),
        ("ConvShifted", "its padding is another"),
        ("ConvEvenTapsShifted", "its padding is another"),
        ("ConvBackwards", "its padding is another"),
        ("ConvDilated", "dilated"),
        ("ConvStrided", "not a depthwise convolution of stride 1"),
        ("ConvAlone", "as in a plain convolution"),
        ("ConvFiltersDiffer", "different filters"),
        ("ConvFilterOfChannels", "differs among channels"),
        ("ConvWeightsOfEitherSign", "is 0 or less"),
        ("ConvWithEps", "1e-06 is added"),
        ("fastformer_pools_keys", "pooling is of other keys"),
        ("fastformer_only_weights_filled", "left out of a pooling, and not of its softmax"),
        ("efficient_axes_swapped", "softmaxes are not over"),
        ("efficient_channels_left_out", "channels of the query"),
        ("full_clamped_bias", "go through Clip once the position bias is added"),
        ("full_keys_much_lower", "go through Where once the position bias is added"),
        ("full_mask_of_queries_and_keys", "more than two positions"),
        ("fastformer_weights_multiplied", "a tensor that is not a mask"),
        ("linear_opposite_mask_below", "different weights"),
        ("linear_of_keys_before", "mask is not known to be of the keys after"),
        ("linear_of_keys_up_to_the_next", "mask is not known to be of the keys after"),
        ("fastformer_filled_with_ten", "a linear layer of the pooled tensor"),
        ("linear_causal_above_alone", "sums over different keys"),
        ("simple_causal_above_alone", "sums over different keys"),
        ("linear_rows_masked_below_alone", "multiplied by a mask, and the numerator is not"),
        ("linear_scaled_below_alone", "the denominator is scaled"),
        ("simple_mean_of_values", "divided by the number of tokens"),
        ("simple_numbers_added", "added to the weighted sum before the division"),
        ("simple_not_normalized", "nothing divides the weighted sum"),
        ("simple_relu_weights", "neither exponentials of keys nor products of features"),
        ("simple_one_key_by_softplus", "neither sigmoid, tanh nor relu"),
        ("simple_rows_filled_with_one", "no gate multiplies"),
        ("pooling", "one row for all tokens"),
        ("pooling_of_one_key", "one row for all tokens"),
        ("positions_alone", "the weights are constants"),
        ("efficient_query_not_normalized", "the query is not normalized"),
        ("efficient_keys_not_normalized", "the keys are not normalized"),
        ("products_of_queries_below", "different weights"),
        ("products_clamped_above", "goes through Clip"),
        ("products_clamped_and_eps", "goes through Clip"),
        ("products_eps_of_keys", "added to the sum of the keys"),
        ("products_sines_swapped_below", "different weights"),
        ("simple_eps_after_the_maximum", "0.01 is added once the sum"),
        ("separable_over_the_batch", "may be the batch"),
        ("separable_leaky", "neither sigmoid, tanh nor relu"),
        ("cross_masked_below_alone", "different weights"),
        ("cross_dot_product", "its keys have other tokens than its queries"),
        ("ConvCircular", "padding other than zeros"),
        ("ConvPaddedByOnes", "padding other than zeros"),
        ("ConvOfAllChannels", "not a depthwise convolution of stride 1"),
    ],
)
def test_near_miss_names_the_condition(name: str, reason: str) -> None:
    found, _ = fused(scripted(LOOK_ALIKES[name], example()))
    reasons = [miss.reason for miss in found.near_misses] + [match.note for match in found.matches]
    assert [given for given in reasons if reason in given], reasons


@pytest.mark.parametrize("name", ["simple_eps_after_the_maximum", "ConvWithEps"])
def test_number_in_denominator_has_a_remedy(name: str) -> None:
    found, _ = fused(scripted(LOOK_ALIKES[name], example()))
    (miss,) = found.near_misses
    assert miss.advice == f"{miss.reason}. {DIVIDE_BY_SUM}"
