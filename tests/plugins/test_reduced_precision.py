"""AFT-full's products in bfloat16 and 8-bit integers, against the definition in float64."""

import os
from pathlib import Path

import numpy as np
import pytest

from aftexport.parity import TOLERANCES
from aftplugins.methods import METHOD_VARIABLE

from .runner import check, definition, random_inputs, run, run_with_constant, session

AFT_FULL = ["AftFull", "CausalAftFull"]
BFLOAT16_BOUND = 1e-2
INT8_BOUND = TOLERANCES["int8"].bound


def biases_within(span: float, tokens: int) -> np.ndarray:
    """Return a position bias [tokens, tokens]; all rows and their starts have this span."""
    bias = np.random.default_rng(0).random((tokens, tokens)) * span
    bias[:, 0], bias[:, 1:2] = 0.0, span
    return bias.astype(np.float32)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("which", "bad"), [(1, np.nan), (2, np.nan), (3, np.nan), (1, np.inf), (3, np.inf)]
)
@pytest.mark.parametrize("constant", [True, False])
def test_nan_inputs_survive_reduced_precision(
    precision: str, which: int, bad: float, constant: bool
) -> None:
    inputs = random_inputs("AftFull", 2, 70, 32, lengths=[60, 70])
    inputs[3] = biases_within(1.0, 70)
    at = (40, 37) if which == 3 else (0, 37, 0)
    inputs[which][at] = bad
    if constant:
        result = run_with_constant("AftFull", "position_bias", inputs, precision=precision)
    else:
        result = run("AftFull", inputs, precision=precision)
    assert np.isnan(result[0, 40, 0])


@pytest.mark.parametrize("op", AFT_FULL)
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("tokens", [1, 12, 33, 257, 530])
def test_bfloat16_products_are_within_bound(op: str, tokens: int, scale: float) -> None:
    inputs = random_inputs(op, 2, tokens, 40, scale=scale, lengths=[tokens, tokens // 3])
    check(op, inputs, bound=BFLOAT16_BOUND, precision="bf16")


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("span", [0.0, 1.0, 2.0, 2.1])
@pytest.mark.parametrize("tokens", [12, 257, 530])
def test_bfloat16_products_tolerate_distant_biases(tokens: int, span: float, scale: float) -> None:
    """Up to some span of a row, 16-bit integers take the place of bfloat16 in some processors."""
    inputs = random_inputs("AftFull", 2, tokens, 40, scale=scale, lengths=[tokens, tokens // 3])
    inputs[3] = biases_within(span, tokens)
    check("AftFull", inputs, bound=BFLOAT16_BOUND, precision="bf16")


@pytest.mark.parametrize("op", AFT_FULL)
def test_late_large_key_in_bfloat16(op: str) -> None:
    inputs = random_inputs(op, 1, 400, 16)
    inputs[1][0, -1] = 120.0
    inputs[1][0, 200, ::3] = 90.0
    inputs[3][:, ::3] = -80.0
    check(op, inputs, bound=BFLOAT16_BOUND, precision="bf16")


@pytest.mark.parametrize("op", AFT_FULL)
def test_bfloat16_mean_loses_only_rounding(op: str) -> None:
    """The values are equal: the mean loses no more than bfloat16 rounds."""
    inputs = random_inputs(op, 1, 300, 16, scale=3.0)
    inputs[2][:] = 0.7
    actual = run(op, inputs, gate="none", precision="bf16")
    np.testing.assert_allclose(actual, np.float32(0.7), rtol=2**-8)


@pytest.mark.parametrize("op", AFT_FULL)
def test_default_precision_is_float32(op: str) -> None:
    inputs = random_inputs(op, 1, 90, 24)
    exact = run(op, inputs)
    for precision in ("fp32", "fp16"):
        np.testing.assert_array_equal(run(op, inputs, precision=precision), exact)


@pytest.mark.skipif(
    "avx512_bf16" not in Path("/proc/cpuinfo").read_text() or "AFTEXPORT_ISA" in os.environ,
    reason="no AVX512_BF16 here, or AFTEXPORT_ISA may forbid it",
)
@pytest.mark.parametrize("op", AFT_FULL)
def test_bfloat16_runs_on_supporting_processors(op: str) -> None:
    inputs = random_inputs(op, 1, 90, 24)
    assert (run(op, inputs, precision="bf16") != run(op, inputs)).any()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("eps", [1e-6, 1.0, 1e6])
def test_eps_is_relative_to_packed_weights(precision: str, eps: float) -> None:
    """A constant bias is packed for all its tokens, of which a run has some."""
    bound = BFLOAT16_BOUND if precision == "bf16" else INT8_BOUND
    for level in (-14.0, 0.0, 14.0):
        inputs = random_inputs("AftFull", 2, 90, 40, lengths=[90, 30])
        inputs[1] += level
        inputs[3] = biases_within(1.0, 120) + np.float32(3.0)
        check("AftFull", inputs, bound=bound, precision=precision, eps=eps)
        found = run_with_constant("AftFull", "position_bias", inputs, precision=precision, eps=eps)
        expected = definition("AftFull", inputs, eps=eps)
        for b, length in enumerate(inputs[-1]):
            error = np.abs(found[b, :length] - expected[b, :length]).max()
            assert error <= bound * np.abs(inputs[2]).max()


@pytest.mark.table(keep=0.3)
@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0, 4.0, 10.0, 100.0])
@pytest.mark.parametrize("tokens", [1, 12, 33, 257, 513, 1030])
def test_int8_products_are_within_bound(tokens: int, scale: float) -> None:
    inputs = random_inputs("AftFull", 2, tokens, 40, scale=scale, lengths=[tokens, tokens // 3])
    inputs[3] = biases_within(1.0, tokens)
    check("AftFull", inputs, bound=INT8_BOUND, precision="int8")


def test_small_keys_survive_in_int8() -> None:
    """Many keys are far below the largest."""
    inputs = random_inputs("AftFull", 1, 500, 16)
    inputs[1][:] = 0.0
    inputs[1][0, 17] = 6.5  # as much as 665 others, which are a fifth of a step each
    inputs[2][:] = 1.0
    inputs[2][0, 17] = -1.0
    inputs[3] = biases_within(0.0, 500)
    check("AftFull", inputs, bound=INT8_BOUND, precision="int8", gate="none")


def test_int8_mean_keeps_equal_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster methods of some processors round the values to bfloat16."""
    monkeypatch.setenv(METHOD_VARIABLE, "int8")
    inputs = random_inputs("AftFull", 1, 300, 16, scale=3.0)
    inputs[2][:] = 0.7
    inputs[3] = biases_within(1.0, 300)
    actual = run("AftFull", inputs, gate="none", precision="int8")
    np.testing.assert_allclose(actual, np.float32(0.7), rtol=3e-5)


@pytest.mark.parametrize("op", AFT_FULL)
def test_unsafe_int8_falls_back_to_bfloat16(op: str) -> None:
    inputs = random_inputs(op, 1, 90, 24)
    inputs[3] = biases_within(0.9 if op == "CausalAftFull" else 1.1, 90)
    np.testing.assert_array_equal(
        run(op, inputs, precision="int8"), run(op, inputs, precision="bf16")
    )


@pytest.mark.skipif(
    "avx512_vnni" not in Path("/proc/cpuinfo").read_text() or "AFTEXPORT_ISA" in os.environ,
    reason="no AVX512_VNNI here, or AFTEXPORT_ISA may forbid it",
)
def test_int8_runs_on_supporting_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METHOD_VARIABLE, "int8")
    session.cache_clear()
    inputs = random_inputs("AftFull", 1, 90, 24)
    inputs[3] = biases_within(1.0, 90)
    rounded = run("AftFull", inputs, precision="int8")
    for wider in ("fp32", "bf16"):
        assert (rounded != run("AftFull", inputs, precision=wider)).any()
    session.cache_clear()


@pytest.mark.skipif(
    "avx2" not in Path("/proc/cpuinfo").read_text() or "AFTEXPORT_ISA" in os.environ,
    reason="no AVX2 here, or AFTEXPORT_ISA may forbid it",
)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_close_biases_use_reduced_precision(precision: str) -> None:
    inputs = random_inputs("AftFull", 1, 90, 24)
    inputs[3] = biases_within(1.0, 90)
    assert (run("AftFull", inputs, precision=precision) != run("AftFull", inputs)).any()


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_constant_bias_is_packed_in_bfloat16(scale: float) -> None:
    inputs = random_inputs("AftFull", 2, 300, 24, scale=scale, lengths=[300, 100])
    exact = run("AftFull", inputs)
    packed = run_with_constant("AftFull", "position_bias", inputs, precision="bf16")
    bound = BFLOAT16_BOUND * np.abs(inputs[2]).max()
    for b, length in enumerate(inputs[-1]):
        np.testing.assert_allclose(packed[b, :length], exact[b, :length], rtol=0, atol=bound)


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("span", [1.0, 1.1, 2.1])
@pytest.mark.parametrize("tokens", [90, 1000])
def test_packed_constant_bias_serves_every_length(tokens: int, span: float, precision: str) -> None:
    inputs = random_inputs("AftFull", 2, tokens, 24, lengths=[tokens, tokens // 2])
    inputs[3] = biases_within(span, 1000)
    constant = run_with_constant("AftFull", "position_bias", inputs, precision=precision)
    np.testing.assert_array_equal(constant, run("AftFull", inputs, precision=precision))
