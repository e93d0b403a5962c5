import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx.parser
import pytest
import safetensors.numpy
from bundles import changed_manifest, classes, resealed
from commands import Capture, assert_refused, listing, run_here, without

import aftplugins
from aftexport import parity
from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.parity import Tolerance
from aftexport.parity.run_cases import verify
from aftexport.verify import check


def wrong_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exported function adds where it should multiply."""
    right = ALL_OPERATORS["AftSimple"]

    def body(**settings: str) -> str:
        return right.body(**settings).replace("Mul(weight,", "Add(weight,")

    monkeypatch.setitem(ALL_OPERATORS, "AftSimple", dataclasses.replace(right, body=body))


def strict_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """No float32 model is as exact as this."""
    monkeypatch.setitem(parity.TOLERANCES, "fp32", Tolerance(1e-12, "for the test"))


@pytest.fixture(params=[wrong_body, strict_table], ids=["wrong body", "strict table"])
def differing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[pytest.MonkeyPatch], None]:
    monkeypatch.setenv("AFTEXPORT_PORTABLE", "1")
    request.param(monkeypatch)
    return request.param


def test_differing_model_is_set_aside(
    differing: object, checkpoint_file: Path, bundle_copy: Path, tmp_path: Path, capsys: Capture
) -> None:
    """It is also reported."""
    before = listing(bundle_copy)
    words = [checkpoint_file, "--to", "onnx", "--out", bundle_copy, "--force"]
    outcome = run_here(words, capsys)
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    assert "Parity failed" in outcome.err
    assert str(bundle_copy) + ".failed" in outcome.err.replace("\n", "")
    assert listing(bundle_copy) == before
    kept = Bundle.open(tmp_path / "copy.bundle.failed")
    record = json.loads((kept.path / "parity.json").read_text())
    failed = [case for case in record["cases"] if not case["passed"]]
    furthest = max(failed, key=lambda case: float(case["error"]) / case["bound"])
    assert furthest["case"] in outcome.err
    assert furthest["subject"] in outcome.err
    assert f"{float(furthest['error']):.1e}" in outcome.err
    assert "OUTSIDE" in (kept.path / "parity.html").read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"copy.bundle", "copy.bundle.failed"}
    assert run_here(["verify", kept.path], capsys).code == 1


def test_failed_bundle_spares_other_folders(
    checkpoint_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A failed bundle does not replace a folder without a bundle."""
    strict_table(monkeypatch)
    (tmp_path / "out.failed").mkdir()
    (tmp_path / "out.failed" / "notes.txt").write_text("mine")
    outcome = run_here([checkpoint_file, "--to", "onnx", "--out", tmp_path / "out"], capsys)
    assert outcome.code in (1, 2)
    assert (tmp_path / "out.failed" / "notes.txt").read_text() == "mine"


def altered(folder: Path) -> Path:
    """The last layer's biases are off by one."""
    model = onnx.load(folder / "model.onnx")
    bias = next(t for t in model.graph.initializer if t.name == "head.bias")
    values = onnx.numpy_helper.to_array(bias) + 1
    bias.CopyFrom(onnx.numpy_helper.from_array(values, "head.bias"))
    onnx.save(model, folder / "model.onnx")
    return resealed(folder)


def test_cases_strain_operators_and_lengths(bundle_folder: Path) -> None:
    bundle = Bundle.open(bundle_folder)
    results = verify(bundle, fused=False)
    assert all(result.passed for result in results)
    assert {result.subject for result in results} >= {"model", "AftSimple"}
    assert {"one token", "padded batch", "prime length", "long"} <= {r.case for r in results}
    shapes = {c.inputs["input_ids"].shape for c in bundle.golden() if c.subject == "model"}
    assert shapes >= {(batch, tokens) for batch in (2, 3) for tokens in (1, 2, 3)}


def test_other_failure_keeps_engine_message(bundle_folder: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        main (int64[B, T] input_ids) => (float[B] logits) <int64[1] much = {1125899906842624}> {
            sizes = Shape <end = 1> (input_ids)
            shape = Mul (sizes, much)
            logits = ConstantOfShape (shape)
        }""")
    engine = OnnxRuntimeEngine(model.SerializeToString())
    bundle = Bundle.open(bundle_folder)
    cases = [
        dataclasses.replace(c, inputs={"input_ids": c.inputs["input_ids"]})
        for c in bundle.golden()[:1]
    ]
    with pytest.raises(EngineError, match="allocate memory") as failed:
        verify(bundle, cases=cases, engine=engine)
    assert "PyTorch takes" not in failed.value.problem
    assert "squeeze" not in failed.value.remedy


def test_documents_are_compared_with_pytorch(
    bundle_folder: Path, checkpoint_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "a contract of sale"}')
    words: list[str | Path] = ["verify", bundle_folder, "--model", checkpoint_file]
    words += ["--data", tmp_path / "docs.jsonl", "--lengths", "3,77"]
    page, json_file = tmp_path / "new" / "p.html", tmp_path / "other" / "p.json"
    outcome = run_here([*words, "--output", json_file, "--report", page], capsys)
    assert outcome.code == 0, outcome.err
    record = json.loads(json_file.read_text("utf-8"))
    assert (record["verdict"], record["passed"]) == ("Ship", True)
    shapes = {c["case"]: c["shape"] for c in record["comparisons"] if c["subject"] == "model"}
    assert shapes["77 random tokens"] == [1, 77]
    assert shapes["3 random tokens"] == [1, 3]
    assert shapes["document 1"] == [1, len("a contract of sale")]
    assert "padded batch" in shapes
    assert record["environment"]["onnxruntime"]
    assert "Ship." in outcome.out
    assert "77 random tokens" in page.read_text("utf-8")


def test_the_stored_outputs_need_no_torch(bundle_folder: Path, tmp_path: Path) -> None:
    words = [
        "verify",
        bundle_folder,
        "--report",
        tmp_path / "p.html",
        "--output",
        tmp_path / "p.json",
    ]
    outcome = without(["torch", "onnxscript"], "aftexport", *words, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "stored in the bundle" in (tmp_path / "p.html").read_text("utf-8")


@pytest.mark.parametrize(
    "words", [["--against", "torch"], ["--lengths", "5"], ["--data", "docs.jsonl"]]
)
def test_missing_pytorch_is_reported(
    words: list[str], bundle_folder: Path, capsys: Capture
) -> None:
    assert_refused(run_here(["verify", bundle_folder, *words], capsys), "--model")


def test_factory_is_module_of_fileless_bundle(
    bundle_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A factory without a file is the module of a bundle that had no file."""
    path = tmp_path / "bag.bundle"
    assert (
        run_here(["--factory", "tiny_models:Bag", "--to", "onnx", "--out", path], capsys).code == 0
    )
    words = ["--factory", "tiny_models:Bag"]
    outcome = run_here(["verify", path, *words, "--lengths", "5"], capsys)
    assert outcome.code == 0, outcome.err
    assert "5 random tokens" in outcome.out
    timed = run_here(["bench", path, *words, "--lengths", "5", "--rounds", "1"], capsys)
    assert timed.code == 0, timed.err
    assert "torch" in timed.out.replace("PyTorch", "")
    for command in ("verify", "bench"):
        other = run_here([command, bundle_folder, *words], capsys)
        assert_refused(other, "was exported from a file", "--model")
        alone = run_here([command, path, "--allow-pickle"], capsys)
        assert_refused(alone, "--allow-pickle needs a file", "--model")


@pytest.mark.parametrize(
    ("provider", "remedy"), [("cpu", "or a C++ compiler"), ("cuda", "aftexport_cuda-*.whl")]
)
def test_note_says_how_to_get_kernels(
    provider: Any, remedy: str, bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aftplugins, "library", lambda _: None)
    monkeypatch.delenv(aftplugins.DISABLE_VARIABLE, raising=False)
    (note,) = check._path_notes(Bundle.open(bundle_folder), check.Request(provider=provider))
    assert note.startswith("The fallbacks ran: ")
    assert remedy in note


def test_note_names_bodies_of_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, the CUDA provider runs other bodies than those of the file."""
    monkeypatch.setattr(aftplugins, "library", lambda _: None)
    monkeypatch.delenv(aftplugins.DISABLE_VARIABLE, raising=False)
    manifest = SimpleNamespace(operators=["AftSimple", "LinearResidual"], precision="fp16")
    bundle: Any = SimpleNamespace(manifest=manifest)
    (note,) = check._path_notes(bundle, check.Request(provider="cuda"))
    assert note.startswith("LinearResidual ran by fallbacks with 16-bit products")
    (note,) = check._path_notes(bundle, check.Request(provider="cpu"))
    assert note.startswith("The fallbacks ran: ")
    monkeypatch.setenv(aftplugins.DISABLE_VARIABLE, "1")
    (note,) = check._path_notes(bundle, check.Request(provider="cuda"))
    assert note.startswith("The fallbacks ran: ")


def test_documents_over_maximum_are_refused(
    bundle_folder: Path, checkpoint_file: Path, capsys: Capture
) -> None:
    words = ["--model", checkpoint_file, "--lengths", str(2**20 + 1)]
    assert_refused(run_here(["verify", bundle_folder, *words], capsys), "1048577", "1048576")


def test_altered_bundle_fails_against_pytorch(
    bundle_copy: Path, checkpoint_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    altered(bundle_copy)
    words = ["verify", bundle_copy, "--model", checkpoint_file, "--lengths", "9"]
    outcome = run_here([*words, "--output", tmp_path / "p.json"], capsys)
    assert outcome.code == 1
    assert "Do not ship." in outcome.out
    record = json.loads((tmp_path / "p.json").read_text("utf-8"))
    failed = {c["case"] for c in record["comparisons"] if not c["passed"]}
    assert "9 random tokens" in failed
    assert record["verdict"] == "Do not ship"
    assert record["worst_tokens"]


def test_content_from_elsewhere_is_noted(
    bundle_copy: Path, checkpoint_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The report notes what does not come from the model file."""
    words = ["verify", bundle_copy, "--model", checkpoint_file]
    outcome = run_here([*words, "--output", tmp_path / "whole.json"], capsys)
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "whole.json").read_text("utf-8"))["notes"] == []

    labels = Bundle.open(bundle_copy).manifest.heads["logits"].names
    changed_manifest(bundle_copy, classes(labels[::-1]))
    tokenizer = json.loads((bundle_copy / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    swapped = zip(vocabulary, reversed(vocabulary.values()), strict=True)
    tokenizer["model"]["vocab"] = dict(swapped)
    (bundle_copy / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    golden = safetensors.numpy.load_file(bundle_copy / "golden.safetensors")
    golden["model/long/output/logits"] += 1
    safetensors.numpy.save_file(golden, bundle_copy / "golden.safetensors")
    run_here(
        [*words[:1], resealed(bundle_copy), *words[2:], "--output", tmp_path / "p.json"], capsys
    )
    notes = json.loads((tmp_path / "p.json").read_text("utf-8"))["notes"]
    assert [
        word for note in notes for word in ("labels", "tokenizer", "'long'") if word in note
    ] == ["labels", "tokenizer", "'long'"]


def test_unavailable_engine_is_reported(rtx_bundle: Path, no_gpu: None, capsys: Capture) -> None:
    outcome = run_here(["verify", rtx_bundle], capsys)
    assert outcome.code == 0
    assert "engine was not compared" in outcome.out.replace("\n", " ")


def test_report_never_replaces_its_subject(
    bundle_folder: Path, bundle_copy: Path, checkpoint_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    model = tmp_path / "model.pt"
    model.write_bytes(checkpoint_file.read_bytes())
    before = listing(tmp_path)
    for option, path in (
        ("--report", bundle_copy / "model.onnx"),
        ("--output", bundle_copy / "more.json"),
        ("--report", model),
        ("--output", tmp_path),
        ("--output", model / "below.json"),
    ):
        words = ["verify", bundle_copy, "--model", model, option, path]
        assert_refused(run_here(words, capsys), option)
    words = ["verify", bundle_folder, "--output", bundle_copy / "parity.json"]
    assert_refused(run_here(words, capsys), "lies in the bundle copy.bundle")
    same = tmp_path / "same.html"
    words = ["verify", bundle_copy, "--report", same, "--output", same]
    assert_refused(run_here(words, capsys), "--report and --output are both")
    words = ["bench", bundle_copy, "--lengths", "5", "--output", bundle_copy / "model.onnx"]
    assert_refused(run_here(words, capsys), "--output")
    assert listing(tmp_path) == before
