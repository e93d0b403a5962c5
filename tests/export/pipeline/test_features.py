"""Bundles of models whose tokens are features."""

import json
import shutil
from pathlib import Path
from typing import Any

import input_models
import numpy as np
import pytest
import tiny_models
import torch
from commands import assert_refused, listing, run_here
from input_models import FEATURES, MEAN, NAMES, SCALE, Sensors
from sampling import any_case

import aftexport
from aftexport.bundle.bundle import Bundle
from aftexport.bundle.features import Features
from aftexport.capture.capture import capture
from aftexport.errors import BundleError, UsageError
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.pipeline.export import export


def exported(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Bundle:
    outcome = run_here([*words, "--to", "onnx", "--out", folder / "b"], capsys)
    assert (outcome.code, outcome.err) == (0, "")
    return Bundle.open(folder / "b")


def test_bundle_describes_its_features(feature_bundle: Path) -> None:
    manifest = Bundle.open(feature_bundle).manifest
    assert manifest.features == Features(names=NAMES, mean=MEAN, scale=SCALE)
    assert (manifest.inputs, manifest.vocab_size) == (("input_features", "lengths"), None)
    assert manifest.reference == "float64"
    assert manifest.operators
    assert manifest.chunked is not None
    assert manifest.evidence_heads is not None


def test_cases_have_features_of_many_ranges(feature_bundle: Path) -> None:
    cases = {c.name: c for c in Bundle.open(feature_bundle).golden() if c.subject == "model"}
    assert {"one token", "long", "padded batch", "large features", "zero features"} <= set(cases)
    largest = np.abs(cases["large features"].inputs["input_features"]).max()
    assert 20 < largest < 100
    assert len(set(cases["padded batch"].inputs["lengths"])) > 1
    record = json.loads((feature_bundle / "parity.json").read_text("utf-8"))
    assert {"model", "model in chunks", "evidence"} <= {c["subject"] for c in record["cases"]}


def test_inspect_shows_features(feature_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(["inspect", feature_bundle], capsys)
    assert "north, east, speed, depth (normalized by mean and scale)" in " ".join(
        outcome.out.split()
    )


def test_verify_runs_documents_of_files(
    feature_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", feature_bundle.parent / "model.pt"]
    words = ["verify", feature_bundle, *model, "--factory", "input_models:Sensors"]
    np.save(tmp_path / "drive.npy", np.full((50, FEATURES), 2.5))
    outcome = run_here([*words, "--data", tmp_path / "drive.npy", "--lengths", "65"], capsys)
    assert (outcome.code, outcome.err) == (0, "")
    assert "drive.npy" in outcome.out
    assert "65 random tokens" in outcome.out
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"input_features": [[1, 2, 3, 4], [0.5, 0, 0, 0]]}), "utf-8")
    outcome = run_here([*words, "--data", lines, "--search", "6", "--layers"], capsys)
    assert (outcome.code, outcome.err) == (0, "")
    assert "document 1" in outcome.out


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((3, 5)), "expected numbers [tokens, 4], got float64 [3, 5]"),
        (np.zeros(4), "expected numbers [tokens, 4], got float64 [4]"),
        (np.zeros((0, 4)), "expected at least one token"),
        (np.full((2, 4), np.nan), "expected finite float32 values, got nan"),
        (np.array([[object()]]), "Object arrays cannot be loaded"),
    ],
)
def test_verify_refuses_bad_arrays(
    array: Any, said: str, feature_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    model = ["--model", feature_bundle.parent / "model.pt"]
    words = ["verify", feature_bundle, *model, "--factory", "input_models:Sensors"]
    outcome = run_here([*words, "--data", tmp_path / "a.npy"], capsys)
    assert_refused(outcome, said)


def test_bench_times_features(feature_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", feature_bundle, "--lengths", "64", "--rounds", "1", "--against", "none"]
    outcome = run_here(words, capsys)
    assert (outcome.code, outcome.err) == (0, "")


def test_option_declares_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--factory", "input_models:Undeclared")
    manifest = exported(tmp_path, capsys, *words, "--features", "4").manifest
    assert manifest.features == Features.of_count(FEATURES)
    assert manifest.inputs == ("input_features",)


def test_mask_of_padding_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = exported(tmp_path, capsys, "--factory", "input_models:Masked").manifest
    assert manifest.inputs == ("input_features", "lengths")


def test_program_keeps_its_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.export.save(capture(Sensors()), tmp_path / "model.pt2")
    manifest = exported(tmp_path, capsys, str(tmp_path / "model.pt2")).manifest
    assert manifest.features == Features.of_count(FEATURES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["input_models:Sensors", "--features", "5"], "The number of features must be 4"),
        (["input_models:Undeclared"], "--features N"),
        (["input_models:Undeclared", "--features", "3"], "also fails in PyTorch"),
        (["input_models:Sensors", "--vocab-size", "9"], "--vocab-size is for models of token"),
        (["input_models:Sensors", "--tokenizer", "{tokenizer}"], "Expected no tokenizer"),
        (["tiny_models:Bag", "--feature-file", "{features}"], "got the parameter input_ids"),
        (["input_models:Sensors", "--feature-file", "{none}"], "cannot be read"),
    ],
)
def test_unfit_options_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(tiny_models.byte_tokenizer().to_str(), "utf-8")
    places = {
        "tokenizer": tokenizer,
        "features": input_models.feature_file(tmp_path),
        "none": tmp_path / "none.json",
    }
    before = listing(tmp_path)
    filled = [word.format(**places) for word in words]
    command = ["--factory", *filled, "--to", "onnx", "--out", tmp_path / "b"]
    assert_refused(run_here(command, capsys), said)
    assert listing(tmp_path) == before


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_other_precisions_take_float32_features(precision: str, tmp_path: Path) -> None:
    bundle = export(factory="input_models:Sensors", precision=precision, out=tmp_path / "b")
    case = next(c for c in bundle.golden() if c.subject == "model")
    assert case.inputs["input_features"].dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 10}, "expected features only"),
        ({"features": None}, "expected features only"),
        ({"features": {"names": ["a", "b", "c"]}}, "must describe every feature"),
        ({"inputs": ["input_ids", "input_features"]}, "inputs: expected one of"),
    ],
)
def test_manifest_of_other_features_is_refused(
    changes: dict[str, Any], said: str, feature_bundle: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(feature_bundle, tmp_path / "b"))
    content = json.loads((folder / "manifest.json").read_text("utf-8"))
    (folder / "manifest.json").write_text(json.dumps(content | changes), "utf-8")
    with pytest.raises(BundleError, match=said):
        Bundle.open(folder)


def test_saved_classifier_keeps_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    settings = {**tiny_models.CONFIG, "vocab_size": None, "num_features": FEATURES}
    model = DocumentClassifier(ClassifierConfig(**settings))
    features, lengths = torch.randn(2, 5, FEATURES), torch.tensor([5, 3])
    torch.testing.assert_close(
        model(features, lengths), model(input_features=features, lengths=lengths)
    )
    aftexport.save(tmp_path / "model.pt", model=model, labels=tiny_models.LABELS)
    manifest = exported(tmp_path, capsys, str(tmp_path / "model.pt")).manifest
    assert manifest.features == Features.of_count(FEATURES)
    assert manifest.config is not None
    assert manifest.config["num_features"] == FEATURES
    with pytest.raises(UsageError, match="Expected no tokenizer"):
        aftexport.save(
            tmp_path / "model.pt",
            model=model,
            labels=tiny_models.LABELS,
            tokenizer=tiny_models.byte_tokenizer().to_str(),
        )
