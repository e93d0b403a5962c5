"""Models with a row of numbers for every token: rows of padding count nowhere."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import several_heads
import torch
from commands import assert_refused, run_here
from rich.console import Console

import aftserve
from aftexport.bundle.bundle import PARITY, Bundle
from aftexport.bundle.golden import Case
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import TraceError, UsageError
from aftexport.heads import HEADS, Regression, VectorsAnswer
from aftexport.heads.regression import Value
from aftexport.options import ModelSource
from aftexport.parity import compare
from aftexport.pipeline.export import export
from aftexport.pipeline.head_choice import HeadOptions, choose_heads
from aftexport.system.contract import EVIDENCE
from aftexport.verify.check import Request, check
from aftexport.verify.layer_comparison import compare_layers
from aftexport.verify.torch_program import Program

FACTORY = "several_heads:Tokens"
LENGTHS = np.array([3, 1])
PADDED = {"input_ids": np.zeros((2, 3), np.int64), "lengths": LENGTHS}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("tokens") / "model.bundle"
    return export(factory=FACTORY, out=out, task=several_heads.TOKEN_TASKS)


def test_rows_of_tokens_have_a_head(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert {name: head.task for name, head in manifest.heads.items()} == several_heads.TOKEN_TASKS
    assert [head.is_per_token for head in manifest.heads.values()] == [True, False, True]
    assert manifest.explained == "topic"
    graph = onnx.load(bundle.model_path).graph
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in graph.output
    }
    assert shapes == {
        "tags": ["batch", "tokens", 5],
        "topic": ["batch", 3],
        "hidden": ["batch", "tokens", 16],
        EVIDENCE: ["batch", "tokens"],
    }
    assert "LayerNormFeedForward" in manifest.operators  # the outputs do not prevent the fusion


def test_rows_are_those_of_pytorch(bundle: Bundle) -> None:
    model = several_heads.Tokens().eval().double()
    engine = OnnxRuntimeEngine(bundle.model_path)
    case = next(case for case in bundle.golden() if case.name == "padded batch")
    with torch.no_grad():
        inputs = [torch.from_numpy(case.inputs[name]) for name in ("input_ids", "lengths")]
        expected = model(*inputs)
    outputs = engine.run(case.inputs)
    valid = np.arange(case.shape[1]) < case.inputs["lengths"][:, None]
    for name in ("tags", "hidden"):
        np.testing.assert_allclose(outputs[name][valid], expected[name][valid], atol=1e-4)


def test_parity_is_of_rows_without_padding(bundle: Bundle) -> None:
    cases = json.loads((bundle.path / PARITY).read_text("utf-8"))["cases"]
    ours = [case for case in cases if case["subject"] == "model"]
    assert {case["output"] for case in ours} == set(several_heads.TOKEN_TASKS)
    assert all(case["passed"] and case["score_error"] < 1e-4 for case in ours)
    assert {case["output"] for case in cases if case["subject"] == "evidence"} == {"topic"}
    for subject in ("model in chunks", "model in a stock session"):
        others = [case for case in cases if case["subject"] == subject]
        assert {case["output"] for case in others} == set(several_heads.TOKEN_TASKS), subject


def test_padding_is_not_compared() -> None:
    head = HEADS["token_classification"].of_width(2, None)
    expected = np.zeros((2, 3, 2))
    expected[..., 0] = 1.0
    case = Case("padded", "model", PADDED, {"tags": expected})
    output = expected.copy()
    output[1, 1:] = np.inf
    (result,) = compare(case, {"tags": output}, "fp32", heads={"tags": head})
    assert (result.error, result.score_error, result.label_flips) == (0.0, 0.0, 0)
    output[1, 0] = [0.0, 2.0]
    (result,) = compare(case, {"tags": output}, "fp32", heads={"tags": head})
    assert (result.error, result.label_flips, result.closest_margin) == (2.0, 1, -2.0)
    assert result.shape == (2, 3)
    assert not result.passed


def test_verify_compares_rows(bundle: Bundle) -> None:
    request = Request(source=ModelSource(factory=FACTORY), lengths=[40], search=4, layers=True)
    report = check(bundle, request, Console(quiet=True))
    assert report.passed, report.reason
    assert report.layers is not None
    assert {layer.tensor for layer in report.layers.layers} >= set(several_heads.TOKEN_TASKS)


def test_fault_of_token_head_is_blamed(bundle: Bundle, tmp_path: Path) -> None:
    model = onnx.load(bundle.model_path)
    (weight,) = (tensor for tensor in model.graph.initializer if list(tensor.dims) == [16, 5])
    changed = onnx.numpy_helper.to_array(weight).copy()
    changed[0] += 0.1
    weight.CopyFrom(onnx.numpy_helper.from_array(changed, weight.name))
    onnx.save(model, tmp_path / "model.onnx")
    case = next(case for case in bundle.golden() if case.name == "padded batch")
    program = Program.captured(several_heads.Tokens().eval(), torch.float32)
    layers = compare_layers(tmp_path / "model.onnx", program, case, bound=1e-4)
    assert [layer.tensor for layer in layers.layers if layer.outside] == ["tags"]
    assert layers.blame is not None
    assert layers.blame.modules == ("tags",)


def test_only_output_may_be_for_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--factory", "several_heads:OnlyTags", "--to", "onnx", "--out", tmp_path / "b"]
    undeclared = run_here(words, capsys)
    assert_refused(
        undeclared, "a row for every token", "--task token_classification",
        "--task feature_extraction",
    )  # fmt: skip
    other = run_here([*words, "--task", "multi_label_classification"], capsys)
    assert_refused(other, "[batch, width] for multi_label_classification", "regression or")
    assert not list(tmp_path.iterdir())
    labels = ["--task", "token_classification", "--labels", "O,B-LAW,I-LAW,B-DAY,I-DAY"]
    outcome = run_here([*words, *labels], capsys)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "b")
    head = bundle.manifest.heads["logits"]
    assert (head.task, head.names[1]) == ("token_classification", "B-LAW")
    assert bundle.manifest.evidence_heads is None
    assert bundle.manifest.no_evidence == "every output is for tokens"
    verified = run_here(["verify", tmp_path / "b"], capsys)
    assert verified.code == 0, verified.err


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("numbers") / "model.bundle"
    tasks = {"each": "regression", "whole": "binary_classification"}
    return export(factory="several_heads:SingleNumbers", out=out, task=tasks)


def test_single_numbers_need_no_axis(numbers: Bundle) -> None:
    heads = numbers.manifest.heads
    assert [(head.task, head.is_per_token) for head in heads.values()] == [
        ("regression", True), ("binary_classification", False),
    ]  # fmt: skip
    model = several_heads.SingleNumbers().eval().double()
    engine = OnnxRuntimeEngine(numbers.model_path)
    for case in numbers.golden():
        if case.subject != "model":
            continue
        inputs = [torch.from_numpy(case.inputs[name]) for name in ("input_ids", "lengths")]
        with torch.no_grad():
            expected = model(*inputs)
        outputs = engine.run(case.inputs)
        batch, tokens = case.shape
        assert (outputs["each"].shape, outputs["whole"].shape) == ((batch, tokens, 1), (batch, 1))
        valid = np.arange(tokens) < case.inputs["lengths"][:, None]
        np.testing.assert_allclose(outputs["each"][valid][:, 0], expected["each"][valid], atol=1e-5)
        np.testing.assert_allclose(outputs["whole"].ravel(), expected["whole"].ravel(), atol=1e-5)
    assert numbers.manifest.chunked is not None
    assert numbers.manifest.explained == "whole"
    request = Request(
        source=ModelSource(factory="several_heads:SingleNumbers"), lengths=[40], layers=True
    )
    report = check(numbers, request, Console(quiet=True))
    assert report.passed, report.reason


def test_values_of_tokens_are_answered(numbers: Bundle) -> None:
    """In their units, in one run and in parts."""
    text = "one number for each byte"
    with aftserve.Predictor(numbers.path) as predictor:
        (answer,) = predictor([list(text.encode())])
    with torch.no_grad():
        ids = torch.tensor([list(text.encode())])
        expected = several_heads.SingleNumbers().eval()(ids, torch.tensor([len(text)]))["each"]
    vectors = answer.heads["each"].vectors
    np.testing.assert_allclose(np.ravel(vectors), expected.ravel(), atol=1e-4)
    head = numbers.manifest.heads["each"]
    scaled = head.model_copy(update={"values": (Value(name="age", scale=2.0, offset=1.0),)})
    assert isinstance(scaled, Regression)
    rows = expected.ravel()[:, None].double().numpy()
    found = scaled.answer(rows)
    assert isinstance(found, VectorsAnswer)
    np.testing.assert_allclose(found.vectors, 2 * rows + 1, rtol=1e-6)
    decoder = scaled.decoder()
    decoder.add(rows[:5])
    decoder.add(rows[5:])
    assert decoder.finish().answer() == found


@pytest.mark.parametrize(("name", "rank"), [("each", 3), ("whole", 2)])
def test_single_numbers_of_onnx_file(name: str, rank: int, tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(30, 1)).astype(np.float32)
    body = (
        "y = Squeeze(x, last)" if name == "each"
        else "mean = ReduceMean <keepdims = 0> (x, tokens) y = Squeeze(mean, last)"
    )  # fmt: skip
    axes = "batch, tokens" if name == "each" else "batch"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 20]>
        g (int64[batch, tokens] input_ids) => (float[{axes}] y)
        <int64[1] last = {{-1}}, int64[1] tokens = {{1}}>
        {{ x = Gather(table, input_ids) {body} }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    onnx.save(model, tmp_path / "model.onnx")
    bundle = export(tmp_path / "model.onnx", out=tmp_path / "b", task="regression")
    assert bundle.manifest.heads["y"].is_per_token is (name == "each")
    ids = np.array([[3, 4, 5], [6, 7, 8]])
    (output,) = OnnxRuntimeEngine(bundle.model_path).run({"input_ids": ids}).values()
    expected = table[ids] if name == "each" else table[ids].mean(1)
    assert output.ndim == rank
    np.testing.assert_allclose(output, expected, atol=1e-6)


def test_other_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=r"Expected rows \[1, 1\] of the output 'logits'.*\[1, 2\]"
    ):
        export(
            factory="several_heads:OneMore", out=tmp_path / "b", task="token_classification",
            check_parity=False, batching=False,
        )  # fmt: skip


def test_padding_must_not_change_rows(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="that do not depend on padding"):
        export(
            factory="several_heads:Smeared", out=tmp_path / "b", task="token_classification",
            check_parity=False,
        )  # fmt: skip


def test_tasks_must_suit_rows() -> None:
    outputs = {"tags": np.zeros((1, 4, 3))}
    with pytest.raises(
        UsageError, match=r"--task token_classification .*--task feature_extraction"
    ):
        choose_heads(outputs, HeadOptions())
    heads = choose_heads(outputs, HeadOptions(task="feature_extraction"))
    assert heads["tags"].is_per_token
    documents = choose_heads({"tags": np.zeros((1, 3))}, HeadOptions(task="feature_extraction"))
    assert not documents["tags"].is_per_token
    with pytest.raises(UsageError, match="token_classification"):
        choose_heads({"tags": np.zeros((1, 3))}, HeadOptions(task="token_classification"))
