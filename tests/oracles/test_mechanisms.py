"""The formulas on numbers that can be computed by hand, and rules that the papers leave open."""

from math import e, inf, log, nan

import numpy as np
import pytest

from oracles import mechanisms
from oracles.mechanisms import MECHANISMS

from .documents import TOKENS, WINDOW, attributes_of, random_inputs

GATED = [stem for stem in MECHANISMS if stem.startswith("aft_")]
every_mechanism = pytest.mark.parametrize("stem", MECHANISMS)


def first_tokens(stem: str, inputs: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Return the document's first tokens; a band row or a filter ends at its own token."""
    cut = {name: x[:, :count] if x.ndim == 3 else x for name, x in inputs.items()}
    if stem == "aft_local":
        cut["band"] = np.pad(cut["band"], ((0, 0), (0, WINDOW - 1)))
    if stem == "aft_conv":  # "same" padding has half of the taps before the token
        cut["filter"] = np.pad(cut["filter"], ((0, 0), (0, WINDOW)))
    return cut | {"lengths": np.array([count])}


def one_channel(**tensors: list) -> dict[str, np.ndarray]:
    """Return a document of one channel; a list of numbers has one for each token."""
    inputs = {name: np.array(x, dtype=float) for name, x in tensors.items()}
    for name in ("query", "key", "value"):
        inputs[name] = inputs.get(name, np.zeros(len(tensors["value"])))[None, :, None]
    return inputs | {"lengths": np.array([len(tensors["value"])])}


def test_aft_full_by_hand() -> None:
    inputs = one_channel(
        key=[0, log(3)], value=[4, 8], position_bias=[[log(2), 0], [0, log(5)]], query=[0, log(3)]
    )
    means = [(2 * 4 + 3 * 8) / (2 + 3), (1 * 4 + 3 * 5 * 8) / (1 + 3 * 5)]
    computed = mechanisms.aft_full(inputs, gate="none")[0, :, 0]
    np.testing.assert_allclose(computed, means)
    gates = [1 / 2, 3 / 4]
    np.testing.assert_allclose(mechanisms.aft_full(inputs)[0, :, 0], np.multiply(gates, means))
    gates = [0, (3 - 1 / 3) / (3 + 1 / 3)]
    computed = mechanisms.aft_full(inputs, gate="tanh")[0, :, 0]
    np.testing.assert_allclose(computed, np.multiply(gates, means))


def test_aft_local_counts_keys_outside_window() -> None:
    inputs = one_channel(value=[1, 2, 4], band=[[log(3), log(5), log(7)]])
    means = [(5 * 1 + 7 * 2 + 4) / 13, (3 * 1 + 5 * 2 + 7 * 4) / 15, (1 + 3 * 2 + 5 * 4) / 9]
    computed = mechanisms.aft_local(inputs, gate="none")[0, :, 0]
    np.testing.assert_allclose(computed, means)
    inputs["band"] = inputs["band"][:, :2]
    means = [1, (3 * 1 + 5 * 2) / 8, (1 + 3 * 2 + 5 * 4) / 9]
    computed = mechanisms.aft_local(inputs, gate="none", causal=True)[0, :, 0]
    np.testing.assert_allclose(computed, means)


def test_aft_simple_by_hand() -> None:
    inputs = one_channel(key=[0, log(3)], value=[4, 8])
    np.testing.assert_allclose(mechanisms.aft_simple(inputs, gate="none"), np.full((1, 2, 1), 7))


def test_aft_conv_filter_is_centered_or_left() -> None:
    inputs = one_channel(value=[1, 2, 4], filter=[[log(3), log(5)]])
    means = [(3 * 1 + 5 * 2 + 4) / 9, (1 + 3 * 2 + 5 * 4) / 9, (1 + 2 + 3 * 4) / 5]
    computed = mechanisms.aft_conv(inputs, num_heads=1, gate="none")[0, :, 0]
    np.testing.assert_allclose(computed, means)
    means = [1, (3 * 1 + 5 * 2) / 8, (1 + 3 * 2 + 5 * 4) / 9]
    computed = mechanisms.aft_conv(inputs, num_heads=1, gate="none", causal=True)[0, :, 0]
    np.testing.assert_allclose(computed, means)


def test_efficient_attention_by_hand() -> None:
    """Two key channels: one weights the tokens 1 to 3, the other evenly."""
    inputs = {
        "query": np.array([[[log(2), 0], [0, log(5)]]]),
        "key": np.array([[[0, 0], [log(3), 0]]]),
        "value": np.array([[[4.0, 0], [8, 16]]]),
        "lengths": np.array([2]),
    }
    contexts = np.array([[(4 + 3 * 8) / 4, 3 * 16 / 4], [(4 + 8) / 2, 16 / 2]])
    expected = np.array([[2 / 3, 1 / 3], [1 / 6, 5 / 6]]) @ contexts
    computed = mechanisms.efficient_attention(inputs, num_heads=1, scale=0.5)[0]
    np.testing.assert_allclose(computed, 0.5 * expected)
    query, key, value = (inputs[name][0] for name in ("query", "key", "value"))
    computed = mechanisms.efficient_attention(inputs, num_heads=1, normalization="scaling")[0]
    np.testing.assert_allclose(computed, query @ key.T @ value / 2)


def test_fastformer_by_hand() -> None:
    """One head of four equal channels, whose first logits are those of one channel.

    The second logits are 0.
    """
    inputs = one_channel(query=[0, log(3)], key=[1, 2], value=[5, 7])
    inputs = {name: np.repeat(x, 4, axis=-1) if x.ndim == 3 else x for name, x in inputs.items()}
    inputs |= {"alpha_weight": np.full((4, 1), 1 / 2), "beta_weight": np.zeros((4, 1))}
    global_key = (1 + 2) / 2 * 3 / 4 * log(3)
    computed = mechanisms.fastformer(inputs, num_heads=1)[0].T
    np.testing.assert_allclose(computed, np.tile([5 * global_key, 7 * global_key], (4, 1)))
    inputs["query"] += 1
    global_keys = [1, (1 + 2 * (1 / 4 + 3 / 4 * (1 + log(3)))) / 2]
    computed = mechanisms.fastformer(inputs, num_heads=1, causal=True)[0].T
    np.testing.assert_allclose(computed, np.tile(np.multiply([5, 7], global_keys), (4, 1)))


def test_linear_attention_by_hand() -> None:
    inputs = one_channel(query=[1, -1], key=[2, -2], value=[3, 5])
    numerators, normalizers = (3 * 3 + 5 * e**-2), (3 + e**-2)
    first, second = mechanisms.linear_attention(inputs, num_heads=1, eps=0.5)[0, :, 0]
    assert first == pytest.approx(2 * numerators / (2 * normalizers + 0.5))
    assert second == pytest.approx(numerators / e / (normalizers / e + 0.5))
    computed = mechanisms.linear_attention(inputs, num_heads=1, feature_map="relu", eps=0)
    np.testing.assert_allclose(computed[0, :, 0], [3, 0])


@pytest.mark.parametrize("causal", [False, True])
@every_mechanism
def test_padding_is_not_read(stem: str, causal: bool) -> None:
    inputs = random_inputs(stem, [TOKENS, 4, 0, -1, 99], causal=causal)
    clean = MECHANISMS[stem](inputs, causal=causal, **attributes_of(stem))
    assert np.isfinite(clean).all()
    for name in ("query", "key", "value"):
        inputs[name][1, 4:] = nan
        inputs[name][2:4] = nan
    computed = MECHANISMS[stem](inputs, causal=causal, **attributes_of(stem))
    np.testing.assert_array_equal(computed, clean)
    assert not computed[1, 4:].any()
    assert not computed[2:4].any()
    assert computed[4].all()


@pytest.mark.parametrize(
    ("stem", "settings"),
    [
        *((stem, {}) for stem in MECHANISMS if stem != "fastformer"),
        ("efficient_attention", {"normalization": "scaling"}),
    ],
)
def test_causal_rows_end_their_documents(stem: str, settings: dict[str, str]) -> None:
    """Row t in causal form is the last row of the first t + 1 tokens in the other form.

    Fastformer is left out: the products of its earlier rows have means of their own.
    """
    inputs, attributes = random_inputs(stem, [TOKENS], causal=True), attributes_of(stem) | settings
    computed = MECHANISMS[stem](inputs, causal=True, **attributes)
    for t in range(TOKENS):
        short = first_tokens(stem, inputs, t + 1)
        expected = MECHANISMS[stem](short, **attributes)[0, -1]
        np.testing.assert_allclose(computed[0, t], expected)


@pytest.mark.parametrize("causal", [False, True])
@every_mechanism
def test_chosen_rows_equal_whole_document(stem: str, causal: bool) -> None:
    inputs = random_inputs(stem, [TOKENS, 3], causal=causal)
    whole = MECHANISMS[stem](inputs, causal=causal, **attributes_of(stem))
    rows = np.array([1, 5])
    some = MECHANISMS[stem](inputs, causal=causal, rows=rows, **attributes_of(stem))
    np.testing.assert_allclose(some, whole[:, rows], atol=1e-15)


@pytest.mark.parametrize("stem", [*GATED, "efficient_attention"])
def test_keys_of_minus_infinity_have_no_weight(stem: str) -> None:
    inputs = random_inputs(stem, [TOKENS])
    inputs["key"][:, 1] = -inf
    inputs["value"][:, 1] = 1e6
    computed = MECHANISMS[stem](inputs, **attributes_of(stem))
    assert 0 < np.abs(computed).max() < 100
    inputs["key"][:] = -inf
    assert not MECHANISMS[stem](inputs, **attributes_of(stem)).any()


@pytest.mark.parametrize("low", [-1e38, -3e38, 1e38])
@pytest.mark.parametrize("stem", GATED)
def test_shared_shift_of_keys_drops_out(stem: str, low: float) -> None:
    """Beside 1e38 no digit of a bias would be left in a sum."""
    inputs = random_inputs(stem, [TOKENS])
    inputs["key"][:] = 0
    expected = MECHANISMS[stem](inputs, **attributes_of(stem))
    inputs["key"][:] = low
    computed = MECHANISMS[stem](inputs, **attributes_of(stem))
    np.testing.assert_allclose(computed, expected, rtol=1e-12)


def test_shared_shift_of_biases_drops_out() -> None:
    inputs = random_inputs("aft_full", [TOKENS])
    inputs["position_bias"][:] = 0
    expected = mechanisms.aft_full(inputs)
    inputs["position_bias"][::2] = -1e38
    np.testing.assert_allclose(mechanisms.aft_full(inputs), expected, rtol=1e-12)
