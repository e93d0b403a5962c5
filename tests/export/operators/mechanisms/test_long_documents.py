"""Memory grows with the tokens, not with their square, and long sums stay exact enough."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from oracles.mechanisms import MECHANISMS
from sampling import any_case

from aftexport.operators.torch_ops import OPERATORS

from . import peak_memory
from .cases import (
    BOUND,
    ONE_GATE,
    Case,
    Inputs,
    Variant,
    as_tensors,
    make_inputs,
    named,
    run_torch,
)
from .portable import body_model, run_portable

SHORT, LONG = 16_384, 65_536
CASE = Case("long", LONG, (LONG,), channels=16, window=9, relative=True, spread=3)
MILLION = replace(CASE, name="very long", tokens=1_000_000, lengths=(1_000_000,))
HARD = replace(CASE, name="hard and long", spread=1, arrangement="late large key")
OPPOSED = replace(HARD, name="opposed and long", arrangement="opposed")
ROWS = np.array([0, 1, 63, 64, 16_383, 16_384, 40_001, LONG - 1])
LINEAR = [
    v
    for v in ONE_GATE
    if v.operator.stem != "aft_full" and dict(v.settings).get("feature_map") != "relu"
]
GLOBAL = [v for v in LINEAR if not v.causal and v.operator.stem not in ("aft_local", "aft_conv")]
WINDOWED = [v for v in LINEAR if v.operator.stem in ("aft_local", "aft_conv")]
PAIRS = [
    *((v, CASE) for v in LINEAR),
    # The separable sums underflow and the exact form takes over; it is linear too.
    *((v, HARD if v.causal else OPPOSED) for v in WINDOWED),
]


def expected_rows(variant: Variant, inputs: Inputs) -> np.ndarray:
    """The definition at ``ROWS``; Fastformer's, whose rows need each other, by running sums."""
    if variant.operator.stem != "fastformer":
        attributes = variant.attributes(CASE.heads)
        formula = MECHANISMS[variant.operator.stem]
        return formula(inputs, rows=ROWS, causal=variant.causal, **attributes)
    exact = {n: x if n == "lengths" else x.astype(np.float64) for n, x in inputs.items()}

    def pool(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        width = CASE.channels // CASE.heads
        logits = x @ weight / np.sqrt(width)
        weights = np.repeat(np.exp(logits - logits.max()), width, axis=2)
        sums = np.cumsum(weights * x, 1), np.cumsum(weights, 1)
        return sums[0] / sums[1] if variant.causal else sums[0][:, -1:] / sums[1][:, -1:]

    keyed = exact["key"] * pool(exact["query"], exact["alpha_weight"])
    return (exact["value"] * pool(keyed, exact["beta_weight"]))[:, ROWS]


@pytest.mark.table(keep=0.4, by=any_case)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(**named(PAIRS))
def test_body_memory_is_linear_in_tokens(variant: Variant, case: Case, tmp_path: Path) -> None:
    """The body also stays right."""
    inputs = make_inputs(variant.operator, case)
    model, feeds, output = (tmp_path / n for n in ("model.onnx", "inputs.npz", "output.npy"))
    onnx.save(body_model(variant, case.heads), model)
    np.savez(feeds, **inputs)
    script = [sys.executable, peak_memory.__file__, model, feeds, output, SHORT, LONG]
    # A fixed threshold returns each large tensor to the system as soon as it is freed. The
    # allocator's own, which grows, keeps memory by chance: peaks differed by a third between runs.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [str(part) for part in script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    short, long = map(int, done.stdout.split())
    one_tensor = LONG * CASE.channels * 4 / 1024
    assert long < 60 * one_tensor
    assert short > 0
    assert long / short < 8, f"{short} KiB at {SHORT} tokens, {long} KiB at {LONG}"

    result = np.load(output)[:, ROWS]
    expected = expected_rows(variant, inputs)
    difference = np.abs(result - expected).max()
    assert difference / max(1, np.abs(expected).max()) < BOUND["float32"]


@pytest.mark.parametrize(**named(PAIRS))
def test_torch_op_handles_long_document(variant: Variant, case: Case) -> None:
    inputs = make_inputs(variant.operator, case)
    attributes = variant.attributes(case.heads).values()
    result = OPERATORS[variant.op_type].torch_op(*as_tensors(inputs), *attributes).numpy()
    expected = expected_rows(variant, inputs)
    difference = np.abs(result[:, ROWS] - expected).max()
    assert difference / max(1, np.abs(expected).max()) < BOUND["float32"]


@pytest.mark.table(keep=0.2, by=any_case)
@pytest.mark.parametrize(**named([(v, MILLION) for v in GLOBAL]))
def test_body_sums_million_tokens_accurately(variant: Variant, case: Case) -> None:
    inputs = make_inputs(variant.operator, case)
    result = run_portable(variant, inputs, case.heads)
    exact = {n: x if n == "lengths" else x.astype(np.float64) for n, x in inputs.items()}
    expected = run_torch(variant, exact, case.heads)
    assert np.abs(result - expected).max() / max(1, np.abs(expected).max()) < BOUND["float32"]
