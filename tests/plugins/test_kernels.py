"""The fused kernels, as ONNX Runtime runs them, against the operators' definitions in float64."""

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import fewer

from .runner import BOUND, OPS, attributes_of, check, random_inputs, rounding_effect, run

NORMALIZED = [op for op in OPS if op.endswith("NormalizedLinearAttention")]
LINEAR = [op for op in OPS if not op.endswith("AftFull")]
"""Those whose cost grows with the tokens and not with their square."""
GATED = [op for op in OPS if "Aft" in op]
WITH_BIAS = [op for op in OPS if op.endswith(("AftLocal", "AftConv", "AftFull"))]


@pytest.mark.table(keep=0.34)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("batch", "tokens", "dim", "heads", "window"),
    [
        (1, 1, 1, 1, 1),
        (1, 1, 16, 4, 3),
        (2, 7, 13, 1, 2),
        (1, 15, 16, 2, 31),
        (1, 17, 64, 8, 9),
        (3, 31, 48, 3, 5),
        (1, 97, 40, 5, 12),
        (2, 101, 36, 1, 40),
        (1, 257, 32, 1, 31),
        (1, 300, 20, 20, 128),
    ],
)
def test_kernel_equals_definition(
    op: str, batch: int, tokens: int, dim: int, heads: int, window: int
) -> None:
    inputs = random_inputs(op, batch, tokens, dim, heads=heads, window=window)
    check(op, inputs, **attributes_of(op, heads))


def test_heads_exceed_million_channels() -> None:
    inputs = random_inputs("Fastformer", 1, 2, 2 * 1_500_001, heads=2)
    check("Fastformer", inputs, **attributes_of("Fastformer", 2))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_extreme_keys_and_biases(op: str, scale: float) -> None:
    inputs = random_inputs(op, 2, 50, 24, heads=2, window=6, scale=scale)
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", OPS)
def test_lengths(op: str) -> None:
    inputs = random_inputs(op, 5, 70, 32, heads=4, window=8, lengths=[0, 1, 33, 69, 70])
    check(op, inputs, **attributes_of(op, 4))


@pytest.mark.parametrize("op", OPS)
def test_padding_does_not_leak(op: str) -> None:
    inputs = random_inputs(op, 1, 60, 32, heads=4, window=8, lengths=[41])
    clean = run(op, inputs, **attributes_of(op, 4))
    for x in inputs[:3]:
        x[:, 41:] = 300.0
    spoilt = run(op, inputs, **attributes_of(op, 4))
    assert np.isfinite(spoilt).all()
    np.testing.assert_allclose(clean[:, :41], spoilt[:, :41], rtol=1e-5, atol=1e-6)


NOT_NUMBERS = [(0, np.nan), (1, np.nan), (2, np.nan), (1, np.inf)]


@pytest.mark.parametrize(
    ("op", "dtype", "which", "bad"),
    [
        (op, dtype, which, bad)
        for (which, bad), dtype, op in product(NOT_NUMBERS, (np.float32, np.float16), OPS)
        # Its sums are infinite, which float16 tensors hold as their largest number.
        if not (op in NORMALIZED and dtype == np.float16 and bad == np.inf)
    ],
)
def test_nan_inputs_propagate_to_output(
    op: str, dtype: type[np.floating], which: int, bad: float
) -> None:
    inputs = random_inputs(op, 2, 70, 32, heads=4, window=8, dtype=dtype, lengths=[60, 70])
    clean = run(op, inputs, **attributes_of(op, 4))
    inputs[which][0, 37, 0] = bad
    result = run(op, inputs, **attributes_of(op, 4))
    reached = slice(37, 60 if which == 1 else 38)
    assert np.isnan(result[0, reached, 0]).all()
    np.testing.assert_array_equal(result[1], clean[1])


def test_nan_query_spares_other_rows() -> None:
    inputs = random_inputs("EfficientAttention", 1, 16, 64)
    inputs[0][0, 3, 8] = 120.0
    clean = run("EfficientAttention", inputs, num_heads=1)
    inputs[0][0, 5, 0] = np.nan
    result = run("EfficientAttention", inputs, num_heads=1)
    others = np.arange(16) != 5
    np.testing.assert_allclose(result[0, others], clean[0, others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", GATED)
@pytest.mark.parametrize("gate", ["tanh", "none"])
def test_gates(op: str, gate: str) -> None:
    inputs = random_inputs(op, 1, 33, 20, heads=2, window=4)
    check(op, inputs, gate=gate, **attributes_of(op, 2))


@pytest.mark.parametrize("op", OPS)
def test_float16(op: str) -> None:
    inputs = random_inputs(op, 2, 65, 40, heads=2, window=7, dtype=np.float16, lengths=[65, 20])
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [3, 40, 200])
def test_a_large_key_late(op: str, tokens: int) -> None:
    inputs = random_inputs(op, 1, tokens, 16, heads=2, window=5)
    inputs[1][0, -1] = 120.0
    inputs[1][0, tokens // 2, ::3] = 90.0
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", [op for op in OPS if not op.endswith("Fastformer")])
@pytest.mark.parametrize(
    "levels", [(-300.0, -300.0), (-300.0, 0.0), (0.0, -300.0), (30.0, 0.0), (0.0, 30.0)]
)
def test_keys_with_changing_level(op: str, levels: tuple[float, float]) -> None:
    inputs = random_inputs(op, 1, 400, 16, heads=2, window=5)
    inputs[1][0, :290] += levels[0]
    inputs[1][0, 290:] += levels[1]
    inputs[0][0, 100:140] *= 20.0
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", [op for op in OPS if not op.endswith("Fastformer")])
def test_minus_infinity_keys_are_ignored(op: str) -> None:
    inputs = random_inputs(op, 1, 90, 24, heads=2, window=5)
    inputs[1][0, :9] = -np.inf
    inputs[1][0, 40:70, ::2] = -np.inf
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", WITH_BIAS)
def test_dominating_key_with_very_negative_bias(op: str) -> None:
    inputs = random_inputs(op, 1, 90, 16, heads=2, window=5)
    inputs[1][0, 30] = 60.0
    inputs[3][:] = np.where(np.arange(inputs[3].shape[1]) % 3 == 1, -80.0, inputs[3])
    check(op, inputs, **attributes_of(op, 2))


@pytest.mark.parametrize("op", WITH_BIAS)
@pytest.mark.parametrize("eps", [1e-6, 1.0, 1e6])
def test_eps_beside_keys_of_any_level(op: str, eps: float) -> None:
    """The sums of exp(K + w) are from far below to far above eps."""
    for level in (-100.0, -14.0, 0.0, 14.0, 100.0):
        inputs = random_inputs(op, 2, 300, 16, heads=2, window=5, lengths=[300, 20])
        inputs[1] += level
        check(op, inputs, eps=eps, **attributes_of(op, 2))


@pytest.mark.parametrize("op", WITH_BIAS)
def test_eps_where_products_underflow(op: str) -> None:
    inputs = random_inputs(op, 1, 90, 16, heads=2, window=5)
    inputs[1][0, 30] = 60.0
    inputs[3][:] = np.where(np.arange(inputs[3].shape[1]) % 3 == 1, -80.0, inputs[3])
    for eps in (1e-30, 1e-6, 1e6):
        check(op, inputs, eps=eps, **attributes_of(op, 2))
    inputs[1][:] = -np.inf
    assert (run(op, inputs, eps=0.5, **attributes_of(op, 2)) == 0).all()


@pytest.mark.parametrize("op", ["AftLocal", "CausalAftLocal"])
def test_one_band_row_serves_every_token(op: str) -> None:
    inputs = random_inputs(op, 2, 77, 16, window=9)
    one_row = inputs[3][:1]
    inputs[3] = np.repeat(one_row, 77, axis=0)
    expected = check(op, inputs)
    inputs[3] = one_row
    np.testing.assert_array_equal(check(op, inputs), expected)


@pytest.mark.parametrize("op", ["EfficientAttention", "CausalEfficientAttention"])
def test_efficient_attention_by_scaling(op: str) -> None:
    inputs = random_inputs(op, 2, 75, 32, lengths=[75, 20])
    check(op, inputs, num_heads=2, normalization="scaling", scale=0.5)
    check(op, inputs, num_heads=2, normalization="softmax", scale=3.0)


@pytest.mark.parametrize("op", ["NormalizedLinearAttention", "CausalNormalizedLinearAttention"])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_linear_attention_settings(op: str, eps: float) -> None:
    check(
        op, random_inputs(op, 2, 75, 32, lengths=[75, 20]), num_heads=2, feature_map="relu", eps=eps
    )
    check(
        op, random_inputs(op, 2, 75, 32, lengths=[75, 20]), num_heads=2, feature_map="elu", eps=eps
    )


@pytest.mark.table(keep=0.5)
@pytest.mark.parametrize("op", LINEAR)
@pytest.mark.parametrize(("tokens", "bound"), [(65_536, 1e-5), (1_048_576, 3e-5)])
def test_equal_keys_average_many_tokens(op: str, tokens: int, bound: float) -> None:
    """Rounding must not pile up: equal terms are the worst case for a running sum."""
    inputs = random_inputs(op, 1, tokens, 16, heads=2, window=4)
    inputs[1][:] = 0.1
    inputs[2][:] = np.linspace(0.3, 0.9, tokens, dtype=np.float32)[None, :, None]
    if op.endswith(("AftLocal", "AftConv")):
        inputs[3][:] = 0.0
    if op.endswith("Fastformer"):
        inputs[0][:] = 0.1
    attributes = attributes_of(op, 2) | ({"gate": "none"} if op in GATED else {})
    actual = run(op, inputs, **attributes)[0, [0, 1000, tokens - 1], 0].astype(np.float64)
    value = inputs[2][0, :, 0].astype(np.float64)
    mean = (
        np.cumsum(value) / np.arange(1, tokens + 1)
        if op.startswith("Causal")
        else np.full(tokens, value.mean())
    )
    if op.endswith("Fastformer"):
        mean = value * np.float64(np.float32(0.1)) ** 2
    np.testing.assert_allclose(actual, mean[[0, 1000, tokens - 1]], rtol=bound)


@pytest.mark.parametrize("op", OPS)
def test_result_is_independent_of_threads(op: str) -> None:
    inputs = random_inputs(op, 1, 700, 64, heads=4, window=16)
    one = run(op, inputs, threads=1, **attributes_of(op, 4))
    for _ in range(3):
        np.testing.assert_array_equal(run(op, inputs, threads=4, **attributes_of(op, 4)), one)


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=fewer(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shape_and_scale(op: str, data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 5), "heads")
    tokens = data.draw(st.integers(1, 80), "tokens")
    scale = data.draw(st.sampled_from([0.01, 1.0, 10.0, 100.0, 1000.0]), "scale")
    inputs = random_inputs(
        op,
        batch := data.draw(st.integers(1, 3), "batch"),
        tokens,
        heads * data.draw(st.integers(1, 35), "width"),
        heads=heads,
        window=data.draw(st.integers(1, 90), "window"),
        scale=scale,
        lengths=data.draw(
            st.lists(st.integers(0, tokens), min_size=batch, max_size=batch), "lengths"
        ),
        seed=data.draw(st.integers(0, 2**32 - 1), "seed"),
    )
    bound, attributes = BOUND[np.dtype(np.float32)], attributes_of(op, heads)
    if op.endswith("Fastformer"):
        # Its second logits are cubic in the inputs: at scale 1,000 the definition itself may move
        # by 3e-3 with the last bit of the inputs.
        bound = max(bound, 2 * rounding_effect(op, inputs, **attributes))
    check(op, inputs, bound=bound, **attributes)
