import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import onnx_texts
import pytest
from commands import assert_refused, run_here

import aftplugins
from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.product_methods import forced_methods, usable_methods
from aftexport.errors import ParityError, UsageError
from aftexport.heads import SingleLabelClassification
from aftexport.parity import compare
from aftexport.pipeline import auto_precision
from aftexport.pipeline.auto_precision import CHEAPEST_FIRST, Advice, advise
from aftexport.pipeline.export import export

needs_kernels = pytest.mark.skipif(
    aftplugins.library("onnxruntime") is None, reason="the fused kernels are not built"
)


@pytest.fixture
def bundle(bundle_folder: Path) -> Bundle:
    return Bundle.open(bundle_folder)


@pytest.fixture
def model(bundle: Bundle) -> onnx.ModelProto:
    return onnx.load(bundle.model_path)


def chosen(found: Advice) -> dict[str, str]:
    return {node.operator: node.precision for node in found.nodes}


@needs_kernels
@pytest.mark.parametrize("precision", ["int8", "bf16", "auto"])
def test_precision_without_effect_is_refused(precision: str, tmp_path: Path) -> None:
    """No product of this model is inside a kernel of the encoder."""
    with pytest.raises(UsageError, match=f"--precision {precision} is for products.*changes none"):
        export(factory="tiny_models:Bag", out=tmp_path / "b", precision=precision)
    assert not list(tmp_path.iterdir())


@needs_kernels
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_precision_without_effect_on_file_is_refused(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = onnx_texts.saved(tmp_path, onnx_texts.text_model())
    words = [path, "--to", "onnx", "--precision", precision]
    assert_refused(run_here(words, capsys), f"--precision {precision}", "changes none")
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@needs_kernels
def test_share_of_products_is_told(
    checkpoint_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export, the record and ``inspect`` say how much of the products is in a precision."""
    words = [checkpoint_file, "--to", "onnx", "--precision", "int8", "--no-verify"]
    outcome = run_here([*words, "--out", tmp_path / "b"], capsys)
    assert outcome.code == 0, outcome.err
    record = json.loads((tmp_path / "b" / "parity.json").read_text())["products"]
    assert record["tokens"] == 512
    assert record["shares"].keys() == {"int8", "fp32"}
    assert sum(record["shares"].values()) == pytest.approx(1)
    said = f"int8 for {record['shares']['int8']:.1%}"
    assert said in " ".join(outcome.out.split())
    assert said in " ".join(run_here(["inspect", tmp_path / "b"], capsys).out.split())


@needs_kernels
@pytest.mark.parametrize("tolerance", [1e-4, 2e-3, 5e-2])
def test_the_choice_holds_the_tolerance(
    tolerance: float, bundle: Bundle, model: onnx.ModelProto
) -> None:
    found = advise(model, bundle.golden(), tolerance)
    cases = [case for case in bundle.golden() if case.subject == "model"]
    # Each method may be the choice of the machine that serves the bundle.
    for methods in ([], *([name] for name in usable_methods("int8"))):
        with forced_methods(methods):
            engine = OnnxRuntimeEngine(model.SerializeToString())
        errors = [r.error for c in cases for r in compare(c, engine.run(c.inputs), "fp32")]
        assert max(errors) <= found.error * (1 + 1e-3) <= tolerance * (1 + 1e-3)
    set_in_model = {
        a.s.decode() for n in model.graph.node for a in n.attribute if a.name == "precision"
    }
    assert set_in_model == set(chosen(found).values())
    assert set(chosen(found)) == {
        "LayerNormQueryKeyValue", "LinearResidual", "LayerNormFeedForward"
    }  # fmt: skip


class Amplified(SingleLabelClassification):
    """A head whose scores have a hundred times the error of the logits."""

    def score_error(self, output: np.ndarray, expected: np.ndarray) -> float:
        return 100 * float(np.abs(output - expected).max())


@needs_kernels
def test_choice_holds_tolerance_for_scores(bundle: Bundle, model: onnx.ModelProto) -> None:
    heads = {"logits": Amplified(labels=bundle.manifest.heads["logits"].names)}
    found = advise(model, bundle.golden(), 2e-3, heads=heads)
    with forced_methods(usable_methods("int8")):
        engine = OnnxRuntimeEngine(model.SerializeToString())
    cases = [case for case in bundle.golden() if case.subject == "model"]
    results = [r for c in cases for r in compare(c, engine.run(c.inputs), "fp32", heads=heads)]
    assert max(result.score_error or 0.0 for result in results) == found.error <= 2e-3
    assert found.error > 10 * max(result.error for result in results)


@needs_kernels
def test_tolerance_never_makes_node_dearer(bundle: Bundle, model: onnx.ModelProto) -> None:
    cheapest: dict[str, int] = {}
    for tolerance in (1e-4, 2e-3, 5e-2):
        ranks = {
            operator: CHEAPEST_FIRST.index(precision)
            for operator, precision in chosen(advise(model, bundle.golden(), tolerance)).items()
        }
        assert all(rank <= cheapest.get(operator, 2) for operator, rank in ranks.items())
        cheapest = ranks
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "precision":
                    attribute.s = b"fp32"
    assert set(cheapest.values()) != {2}


def test_without_kernels_nothing_can_be_measured(
    bundle: Bundle, model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(aftplugins.DISABLE_VARIABLE, "1")
    with pytest.raises(UsageError, match="measures the fused kernels"):
        advise(model, bundle.golden(), 1e-2)


class Supposed:
    """A measurement of errors that are known: they add up over the nodes."""

    errors: ClassVar = {"int8": 4e-3, "bf16": 1e-3, "fp32": 1e-6}

    def __init__(self, model: onnx.ModelProto, cases: object, head: object) -> None:
        self.model = model

    def __call__(self) -> tuple[float, list[np.ndarray]]:
        error = sum(
            self.errors[attribute.s.decode()]
            for node in self.model.graph.node
            for attribute in node.attribute
            if attribute.name == "precision"
        )
        return error, [np.array(error)]


@pytest.fixture
def supposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_precision, "_Measurement", Supposed)
    monkeypatch.setattr(aftplugins, "missing", lambda _: None)


def test_precisions_can_fail_only_together(
    supposed: None, bundle: Bundle, model: onnx.ModelProto
) -> None:
    """Precisions that hold separately may err too much together."""
    found = advise(model, bundle.golden(), 6.5e-3)
    assert sorted(chosen(found).values()) == ["bf16", "bf16", "int8"]
    assert found.error == pytest.approx(6e-3)
    assert sum("together" in node.reason for node in found.nodes) == 2
    assert found.coarsest == "int8"


def test_int8_error_over_tolerance_is_named(
    supposed: None, bundle: Bundle, model: onnx.ModelProto
) -> None:
    found = advise(model, bundle.golden(), 3.5e-3)
    assert set(chosen(found).values()) == {"bf16"}
    assert all("int8 in this node gives an error of 4.0e-03" in node.reason for node in found.nodes)


def test_even_fp32_may_be_too_coarse(
    supposed: None, bundle: Bundle, model: onnx.ModelProto
) -> None:
    with pytest.raises(ParityError, match="even in fp32"):
        advise(model, bundle.golden(), 1e-9)


def test_unsupported_precision_is_not_chosen(
    supposed: None, bundle: Bundle, model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supposed, "errors", dict.fromkeys(CHEAPEST_FIRST, 1e-6))
    found = advise(model, bundle.golden(), 1e-2)
    assert set(chosen(found).values()) == {"fp32"}
    assert all("cannot be measured" in node.reason for node in found.nodes)


@needs_kernels
def test_bundle_explains_chosen_precision(
    checkpoint_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "auto.bundle"
    words: list[str | Path] = [checkpoint_file, "--to", "onnx", "--precision", "auto"]
    assert run_here([*words, "--tolerance", "2e-3", "--out", out], capsys).code == 0
    manifest = Bundle.open(out).manifest
    assert manifest.tolerance == 2e-3
    assert len(manifest.node_precisions) == 3
    assert manifest.precision == Advice(manifest.node_precisions, 2e-3, error=0).coarsest
    shown = run_here(["inspect", out], capsys).out
    title = next(line for line in shown.splitlines() if line.split()[:1] == ["precision"])
    page = (out / "parity.html").read_text("utf-8")
    for node in manifest.node_precisions:
        assert f"in {node.precision}" in title
    assert title.strip().removeprefix("precision").strip() in page
    assert "precision of nodes" in shown
    assert manifest.node_precisions[0].node in shown
    outcome = run_here(["verify", out, "--output", tmp_path / "p.json"], capsys)
    assert outcome.code == 0
    record = json.loads((tmp_path / "p.json").read_text("utf-8"))
    assert record["tolerance"]["bound"] == 2e-3
    assert len(record["node_precisions"]) == 3
    bounds = {c["bound"] for c in record["comparisons"] if c["subject"] == "model"}
    assert bounds == {2e-3}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--to", "onnx", "--tolerance", "1e-2"], "--precision auto"),
        (["--to", "onnx", "--precision", "auto", "--tolerance", "0"], "0 and 1, got 0"),
        (["--to", "onnx", "--precision", "auto", "--tolerance", "1e300"], "0 and 1, got 1e+300"),
        (["--to", "trt-rtx", "--precision", "auto"], "one precision"),
    ],
)
def test_unfit_settings_are_refused(
    words: list[str],
    why: str,
    checkpoint_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert_refused(run_here([checkpoint_file, *words, "--out", out], capsys), why)
    assert not out.exists()
