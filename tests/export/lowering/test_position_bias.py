import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny_models
import torch
from commands import run_here
from hypothesis import given
from hypothesis import strategies as st
from sampling import any_case

import aftexport
from aftexport.capture.capture import ENGINE_PRECISIONS, PRECISIONS, capture
from aftexport.lowering.finish import finish
from aftexport.lowering.position_bias import (
    MAX_RANGE,
    choose_precisions,
    position_biases,
    row_range,
    safe_precision,
)
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.operators.domain import operators_in
from aftexport.pipeline.export import export

TOKENS = 20


def classifier(*ranges: float, causal: bool = False) -> DocumentClassifier:
    """Return one layer per range; its biases fall from the range to 0 along every row."""
    torch.manual_seed(0)
    config = {"mechanism": "aft_full", "max_length": TOKENS, "depth": len(ranges), "causal": causal}
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | config))
    for layer, reach in zip(model.encoder.layers, ranges, strict=True):
        with torch.no_grad():
            layer.attention.row_factor.zero_()[:, 0] = 1.0
            layer.attention.column_factor.zero_()[:, 0] = torch.linspace(reach, 0.0, TOKENS)
    return model


def written_in(model: onnx.ModelProto) -> list[str]:
    """Return the precision that the kernel of each node reads."""
    nodes = [node for node in model.graph.node if node.op_type == "AftFull"]
    return [a.s.decode() for node in nodes for a in node.attribute if a.name == "precision"]


def traced(model: DocumentClassifier, precision: str) -> onnx.ModelProto:
    program = capture(model, dtype=PRECISIONS[precision], max_tokens=TOKENS)
    return finish(lower(program), precision=precision)


@given(st.data())
def test_row_range_covers_visible_keys(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 12))
    numbers = st.floats(-1000, 1000, width=16)
    row = st.lists(numbers, min_size=tokens, max_size=tokens)
    bias = np.array(data.draw(st.lists(row, min_size=tokens, max_size=tokens)), np.float16)
    for causal in (False, True):
        expected = max(
            float(bias[t, u]) - float(bias[t, v])
            for t in range(tokens)
            for u in range(t + 1 if causal else tokens)
            for v in range(t + 1 if causal else tokens)
        )
        assert row_range(bias, causal=causal) == expected


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_infinite_bias_has_no_range(number: float) -> None:
    """Neither has a bias with NaN."""
    bias = np.zeros((3, 3), np.float32)
    bias[1, 2] = number
    assert row_range(bias, causal=False) is None
    assert row_range(bias, causal=True) == 0.0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("precision", "chosen"),
    [
        ("fp16", ["fp16", "fp16", "bf16", "fp32"]),
        ("bf16", ["bf16", "bf16", "bf16", "fp32"]),
        ("int8", ["int8", "bf16", "bf16", "fp32"]),
        ("fp32", ["fp32", "fp32", "fp32", "fp32"]),
    ],
)
def test_cheapest_safe_precision_at_every_border(
    precision: str, chosen: list[str], causal: bool
) -> None:
    """The precision is checked on both sides of each border."""
    borders = [MAX_RANGE[name] for name in ("int8", "fp16", "bf16")]
    assert borders == [1.0, 8.0, 75.0]
    below, above = [0.0, *borders], [*borders, 1e30]
    for low, high, expected in zip(below, above, chosen, strict=True):
        allowed = "bf16" if causal and expected == "int8" else expected
        for reach in (math.nextafter(low, math.inf), high):
            assert safe_precision(precision, reach, causal=causal) == allowed
    assert safe_precision(precision, None, causal=causal) == "fp32"


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize(
    ("precision", "chosen"),
    [
        ("fp16", ["fp16", "fp16", "bf16", "bf16", "fp32"]),
        ("bf16", ["bf16", "bf16", "bf16", "bf16", "fp32"]),
        ("int8", ["int8", "bf16", "bf16", "bf16", "fp32"]),
        ("fp32", ["fp32", "fp32", "fp32", "fp32", "fp32"]),
    ],
)
def test_nodes_follow_their_own_bias(precision: str, chosen: list[str]) -> None:
    ranges = [0.9, 7.9, 8.1, 74.5, 75.5]
    biases = position_biases(traced(classifier(*ranges), precision))
    assert [bias.precision for bias in biases] == chosen
    np.testing.assert_allclose([bias.row_range for bias in biases], ranges, rtol=1e-3)
    assert len({bias.node for bias in biases}) == len(ranges)


def test_nodes_of_other_gate_have_biases() -> None:
    model = classifier(0.9, 0.9, 8.1)
    model.encoder.layers[2].attention.gate = "none"
    file = traced(model, "fp16")
    assert {"AftFull", "AftFull_none"} <= operators_in(file).keys()
    assert [bias.precision for bias in position_biases(file)] == ["fp16", "fp16", "bf16"]


def test_bfloat16_engine_is_measured_in_bfloat16() -> None:
    model = classifier(74.5, 75.5)
    program = capture(model, dtype=ENGINE_PRECISIONS["bf16"], max_tokens=TOKENS)
    biases = position_biases(finish(lower(program), precision="bf16", fuse=False))
    assert [(b.row_range, b.precision) for b in biases] == [(74.5, "bf16"), (75.5, "fp32")]


def test_causal_row_ends_at_diagonal() -> None:
    model = classifier(100.0, causal=True)
    with torch.no_grad():  # rows reach 100, but above the diagonal
        model.encoder.layers[0].attention.column_factor[:-1, 0] = 0.0
        model.encoder.layers[0].attention.row_factor[-1, 0] = 0.0
        model.encoder.layers[0].attention.column_factor[-1, 0] = 100.0
    (bias,) = position_biases(traced(model, "fp16"))
    assert (bias.row_range, bias.precision) == (0.0, "fp16")


def test_computed_bias_counts_as_worst_case() -> None:
    model = traced(classifier(1.0), "fp16")
    node = next(n for n in model.graph.node if n.op_type == "AftFull")
    constant = node.input[3]
    node.input[3] = "computed"
    computing = onnx.helper.make_node("Neg", [constant], ["computed"])
    model.graph.node.insert(0, computing)
    choose_precisions(model, "fp16")
    (bias,) = position_biases(model)
    assert (bias.row_range, bias.precision) == (None, "fp32")


def test_other_mechanisms_have_no_position_bias() -> None:
    assert position_biases(finish(lower(capture(tiny_models.classifier())))) == ()


@pytest.mark.table(keep=0.25, by=any_case)
@pytest.mark.parametrize(
    ("precision", "chosen"),
    [
        ("fp32", ["fp32", "fp32", "fp32", "fp32"]),
        ("fp16", ["fp16", "fp16", "bf16", "fp32"]),
        ("bf16", ["bf16", "bf16", "bf16", "fp32"]),
        ("int8", ["int8", "bf16", "bf16", "fp32"]),
    ],
)
def test_bundle_and_inspect_report_chosen_precision(
    precision: str,
    chosen: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    aftexport.save(
        tmp_path / "model.pt", model=classifier(1.0, 5.0, 20.0, 100.0), labels=tiny_models.LABELS
    )
    bundle = export(tmp_path / "model.pt", precision=precision)  # within tolerance, or it raises
    biases = bundle.manifest.position_biases
    assert [bias.row_range for bias in biases] == [1.0, 5.0, 20.0, 100.0]
    assert [bias.precision for bias in biases] == chosen
    assert written_in(onnx.load(bundle.model_path)) == chosen
    outcome = run_here(["inspect", bundle.path], capsys)
    for bias in biases:
        said = f"{bias.node}: range of a row {bias.row_range:.3g}, exponentials in {bias.precision}"
        assert said in outcome.out
