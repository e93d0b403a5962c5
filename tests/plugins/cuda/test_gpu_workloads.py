"""The workloads of ``make gpu-check`` without a GPU: binding, baselines, accuracy, least time."""

from dataclasses import replace
from enum import IntEnum

import pytest
import torch
from benchmarks.gpu import MECHANISMS, accuracy, roofline, timing
from benchmarks.gpu.library import CALLS, FeatureMap, Gate, Kernels, Normalization
from benchmarks.gpu.workloads import EPSILON, HEADS, LAYER, WINDOW, Workload

from aftexport.operators.registry import ALL_OPERATORS
from aftexport.operators.torch_ops import OPERATORS, expected_outputs
from aftexport.parity import TOLERANCES

KERNELS = (*MECHANISMS, LAYER)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SETTINGS = {
    "gate": Gate.TANH,
    "normalization": Normalization.SCALING,
    "scale": 0.25,
    "feature_map": FeatureMap.RELU,
    "eps": 0.5,
    "epsilon": 0.25,
}
"""Members of the structs at other than their usual values."""


def small(mechanism: str, precision: str = "fp32", *, causal: bool = False) -> Workload:
    return Workload(mechanism, 2, 2 * WINDOW, 8 * HEADS, DTYPES[precision], causal)


def defined(
    workload: Workload, tensors: dict[str, torch.Tensor], **settings: object
) -> torch.Tensor:
    """Compute the mechanism's operator in float64."""
    if workload.mechanism == LAYER:
        operator = ALL_OPERATORS["LayerNormFastformer"]
        inputs = [tensors["query" if name == "x" else name] for name in operator.required_inputs]
        doubled = [x.double() if x.is_floating_point() else x for x in inputs]
        epsilon = settings.get("epsilon", EPSILON)
        (output,) = expected_outputs(operator, *doubled, epsilon=epsilon, num_heads=HEADS)
        return output
    operator = next(
        operator
        for operator in OPERATORS.values()
        if operator.stem == workload.mechanism
        and operator.op_type.startswith("Causal") == workload.causal
    )
    heads = {
        a.name: HEADS for a in operator.attributes if a.name == "num_heads" and not a.is_cpu_only
    }
    attributes = {a.name: settings.get(a.name, a.default) for a in operator.attributes} | heads
    inputs = [tensors[name] for name in operator.required_inputs]
    doubled = [x.double() if x.is_floating_point() else x for x in inputs]
    return operator.compute(*doubled, **attributes)


def assert_close(output: torch.Tensor, expected: torch.Tensor, precision: str) -> None:
    error = (output.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    assert error < TOLERANCES[precision].bound


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("mechanism", KERNELS)
def test_binding_matches_kernel_declarations(
    kernels: Kernels, mechanism: str, precision: str
) -> None:
    workload = small(mechanism, precision)
    tensors = workload.tensors("cpu")
    tensors["lengths"] = torch.tensor([workload.tokens, 77])
    output = workload.kernel(kernels, tensors)()
    expected = defined(workload, tensors)
    assert_close(output[0], expected[0], precision)
    assert_close(output[1, :77], expected[1, :77], precision)


@pytest.mark.parametrize("mechanism", KERNELS)
def test_every_member_of_a_call_arrives(kernels: Kernels, mechanism: str) -> None:
    workload = small(mechanism, causal=mechanism != LAYER)
    tensors = workload.tensors("cpu")
    members = dict(CALLS[mechanism]._fields_)
    settings = {name: value for name, value in SETTINGS.items() if name in members}
    output = workload.kernel(kernels, tensors, **settings)()
    named = {k: v.name.lower() if isinstance(v, IntEnum) else v for k, v in settings.items()}
    assert_close(output, defined(workload, tensors, **named), "fp32")


@pytest.mark.parametrize("precision", DTYPES)
def test_aft_full_around_a_product(kernels: Kernels, precision: str) -> None:
    workload = small("aft_full", precision)
    tensors = workload.tensors("cpu")
    output = workload.product(kernels, tensors)()
    assert_close(output, defined(workload, tensors), precision)


@pytest.mark.parametrize("mechanism", KERNELS)
def test_timing_baselines_compute_same_results(mechanism: str) -> None:
    workload = replace(small(mechanism), tokens=5 * WINDOW)
    tensors = workload.tensors("cpu")
    output = workload.baseline()(*workload.baseline_inputs(tensors))
    assert_close(output, defined(workload, tensors), "fp32")


@pytest.mark.parametrize("mechanism", timing.LAST_ROW_SEES_ALL)
def test_last_causal_row_equals_full_row(kernels: Kernels, mechanism: str) -> None:
    causal = small(mechanism, causal=True)
    tensors = causal.tensors("cpu")
    last, whole = (
        workload.kernel(kernels, tensors)()[:, -1]
        for workload in (causal, replace(causal, causal=False))
    )
    assert_close(last, whole.double(), "fp32")


@pytest.mark.parametrize("mechanism", KERNELS)
def test_long_documents_are_compared_with_float64(kernels: Kernels, mechanism: str) -> None:
    assert accuracy.long_documents(mechanism).batch * HEADS >= 512
    outcome = accuracy.check(small(mechanism), kernels, "cpu")
    assert outcome.passed, outcome
    bound = outcome.said.rpartition(", bound ")[2]
    assert float(bound) == TOLERANCES["fp32"].bound


def test_outputs_with_missing_parts_disagree() -> None:
    workload = replace(small("aft_simple"), tokens=1 << 16)
    tensors = workload.tensors("cpu")
    inputs = workload.baseline_inputs(tensors)
    whole = workload.baseline()(*inputs)
    assert timing.disagreement("all", whole, whole) == []
    half = workload.baseline()(inputs[0], *(x[:, : 1 << 15] for x in inputs[1:]))
    assert "half is" in timing.disagreement("half", half, whole)[0]
    assert timing.disagreement("none", whole * torch.nan, whole)


def test_roofline_names_longer_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, dim = 65536, 512
    words = ["--device", "H100", "--mechanism", "aft_simple", "aft_full", "--type", "bf16"]
    monkeypatch.setattr("sys.argv", ["roofline", *words, "--tokens", str(tokens)])
    roofline.main()
    header, simple, _, full, _ = capsys.readouterr().out.splitlines()
    assert header == roofline.HEADER
    moved, flops = 2 * 4 * tokens * dim, 4 * tokens**2 * dim
    assert simple.split()[-5:] == [
        f"{moved / 1e6:,.0f}", "0.0", f"{moved / 3.0e12 * 1e6:,.1f}", "0.0", "memory"
    ]  # fmt: skip
    moved += 2 * tokens**2
    times = [f"{moved / 3.0e12 * 1e6:,.1f}", f"{flops / 790e12 * 1e6:,.1f}"]
    assert full.split()[-5:] == [f"{moved / 1e6:,.0f}", f"{flops / 1e9:,.1f}", *times, "products"]
