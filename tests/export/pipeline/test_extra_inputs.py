"""Bundles of models with extra inputs."""

import json
import shutil
from pathlib import Path

import input_models
import numpy as np
import pytest
import tiny_models
import torch
from bundles import changed_manifest
from commands import assert_refused, run_here
from rich.console import Console
from sampling import any_case

from aftexport.bundle.bundle import Bundle
from aftexport.capture.capture import capture
from aftexport.deploy.triton import write_repository
from aftexport.errors import BundleError
from aftexport.extra_inputs import parse_inputs, sample_values
from aftexport.pipeline.export import export


def test_bundle_describes_its_inputs(extra_bundle: Path) -> None:
    manifest = Bundle.open(extra_bundle).manifest
    assert manifest.inputs == ("input_ids", "lengths", *input_models.INPUTS)
    expected = parse_inputs(
        {
            "static": "vector:4",
            "region": "category:5",
            "flags": "categories:2:3",
            "token_type_ids": "token_category:6",
        }
    )
    assert manifest.extra_inputs == expected
    assert manifest.reference == "float64"
    assert manifest.chunked is not None
    assert manifest.operators


def test_cases_have_extra_inputs(extra_bundle: Path) -> None:
    cases = {c.name: c for c in Bundle.open(extra_bundle).golden() if c.subject == "model"}
    assert {"largest extra inputs", "extra inputs of 0", "padded batch", "long"} <= cases.keys()
    assert set(cases["largest extra inputs"].inputs["region"]) == {input_models.REGIONS - 1}
    assert cases["long"].inputs["token_type_ids"].max() == input_models.TYPES - 1
    record = json.loads((extra_bundle / "parity.json").read_text("utf-8"))
    subjects = {c["subject"] for c in record["cases"]}
    assert {"model", "model in chunks", "model in a stock session"} <= subjects


def test_optional_parameter_stays_at_its_default(tmp_path: Path) -> None:
    bundle = export(factory="input_models:MaskedTypes", out=tmp_path / "b")
    assert bundle.manifest.inputs == ("input_ids", "lengths")
    bundle = export(
        factory="input_models:MaskedTypes",
        out=tmp_path / "c",
        inputs={"token_type_ids": "token_category"},
    )
    assert bundle.manifest.inputs == ("input_ids", "lengths", "token_type_ids")
    assert bundle.manifest.extra_inputs[0].maximum == 1


@pytest.mark.parametrize(
    ("factory", "words", "said"),
    [
        ("Events", [], "declare each further input by --input NAME=KIND"),
        ("Events", ["--input", "static=vector:4"], "got parameters (input_ids, static, region"),
        ("Late", ["--input", "statics=vector:4"], "with the parameter 'statics' of --input"),
        ("Late", ["--input", "static=vector:5"], "mat1 and mat2 shapes cannot be multiplied"),
        ("Late", ["--input", "static"], "once for each name, as NAME=KIND, got 'static'."),
        ("MaskedTypes", ["--input", "token_type_ids=token_category:3"], "integers below 2"),
        ("Counted", ["--input", "count=category"], "End its kind in :N for integers below N"),
    ],
)
def test_bad_inputs_are_refused(
    factory: str,
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = ["--to", "onnx", "--out", tmp_path / "b"]
    outcome = run_here(["--factory", f"input_models:{factory}", *words, *place], capsys)
    assert_refused(outcome, said)


def test_engines_take_no_extra_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--factory", "input_models:Late", "--input", "static=vector:4", "--to", "trt"]
    assert_refused(run_here([*words, "--out", tmp_path / "b"], capsys), "--input needs --to onnx")


def test_documents_that_change_each_other_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--factory", "input_models:Ranked", "--input", "static=vector:4", "--to", "onnx"]
    outcome = run_here([*words, "--out", tmp_path / "b"], capsys)
    assert_refused(outcome, "do not depend on the other documents of a batch")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "stats"}, "inputs: expected one of"),
        ({"width": 5}, "must describe every input"),
        ({"dtype": "int64", "maximum": 3}, "must describe every input"),
        ({"dtype": "int64"}, "expected a maximum of 'static'"),
    ],
)
def test_damaged_description_is_refused(
    changes: dict[str, object], said: str, extra_bundle: Path, tmp_path: Path
) -> None:
    shutil.copytree(extra_bundle, tmp_path / "b")
    content = json.loads((extra_bundle / "manifest.json").read_text("utf-8"))
    first, *others = content["extra_inputs"]
    changed_manifest(tmp_path / "b", {"extra_inputs": [first | changes, *others]})
    with pytest.raises(BundleError) as error:
        Bundle.open(tmp_path / "b")
    assert said in str(error.value)


def test_verify_runs_documents_of_files(
    extra_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", extra_bundle.parent / "model.pt"]
    words = ["verify", extra_bundle, *model, "--factory", "input_models:Events"]
    lines = tmp_path / "lines.jsonl"
    inputs = {"static": [1, 2, 3, 4], "region": 1, "flags": [0, 2], "token_type_ids": [0, 5]}
    lines.write_text(json.dumps({"text": "ab", "inputs": inputs}), "utf-8")
    more = ["--lengths", "65", "--search", "6", "--layers"]
    outcome = run_here([*words, "--data", lines, *more], capsys)
    assert (outcome.code, outcome.err) == (0, "")
    assert "document 1" in outcome.out
    assert "65 random tokens" in outcome.out
    lines.write_text(json.dumps({"text": "abc", "inputs": inputs}), "utf-8")
    outcome = run_here([*words, "--data", lines], capsys)
    assert_refused(outcome, "'token_type_ids': expected a list of 3 numbers, got a list of 2")


def test_bench_and_inspect_take_extra_inputs(
    extra_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", extra_bundle, "--lengths", "64", "--rounds", "1", "--against", "none"]
    outcome = run_here(words, capsys)
    assert (outcome.code, outcome.err) == (0, "")
    outcome = run_here(["inspect", extra_bundle], capsys)
    assert "token_type_ids: int64 [batch, tokens], 0 to 5" in " ".join(outcome.out.split())


def test_calibrate_uses_extra_inputs(
    extra_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same texts with other extra inputs are different documents."""
    generator = np.random.default_rng(0)
    extras = Bundle.open(extra_bundle).manifest.extra_inputs
    lines = tmp_path / "lines.jsonl"
    content = [
        {
            "text": "abcdef",
            "label": tiny_models.LABELS[index % 3],
            "inputs": sample_values(extras, generator, 6).to_json(),
        }
        for index in range(120)
    ]
    lines.write_text("\n".join(map(json.dumps, content)), "utf-8")
    words = ["calibrate", extra_bundle, "--data", lines, "--out", tmp_path / "c"]
    outcome = run_here(words, capsys)
    assert (outcome.code, outcome.err) == (0, "")
    assert "repeat" not in outcome.out
    calibration = Bundle.open(tmp_path / "c").manifest.calibration
    assert calibration is not None
    assert calibration["logits"].documents == 120


def test_program_has_extra_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extras = parse_inputs({"static": "vector:4"})
    program = capture(input_models.Late(), extras=extras)
    torch.export.save(program, tmp_path / "late.pt2")
    bundle = export(tmp_path / "late.pt2", inputs={"static": "vector:4"})
    assert bundle.manifest.extra_inputs == extras
    words = [tmp_path / "late.pt2", "--to", "onnx", "--force"]
    assert_refused(run_here(words, capsys), "got (input_ids, lengths, static)")
    words += ["--input", "static=categories:4"]
    assert_refused(run_here(words, capsys), "int64 [batch, 4] in the program, got torch.float32")


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_narrow_precision_takes_float32(precision: str, tmp_path: Path) -> None:
    bundle = export(
        factory="input_models:Events",
        inputs=input_models.INPUTS,
        precision=precision,
        out=tmp_path / "b",
    )
    assert bundle.manifest.extra_inputs[0].dtype == "float32"


def test_features_have_extra_inputs(tmp_path: Path) -> None:
    inputs = {"static": "vector:4", "types": "token_category"}
    bundle = export(factory="input_models:Track", inputs=inputs, out=tmp_path / "b")
    assert bundle.manifest.inputs == ("input_features", "lengths", "static", "types")
    assert bundle.manifest.chunked is not None
    assert bundle.manifest.evidence_heads is not None


def test_triton_repository_has_extra_inputs(extra_bundle: Path, tmp_path: Path) -> None:
    folder = write_repository(
        Bundle.open(extra_bundle), tmp_path / "models", name="events", mounted="/models",
        console=Console(quiet=True),
    )  # fmt: skip
    config = (folder / "config.pbtxt").read_text("utf-8")
    for name in input_models.INPUTS:
        assert f'name: "{name}"' in config


def test_numbers_outside_forward_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--factory", "input_models:Logarithm", "--to", "onnx", "--out", tmp_path / "a.bundle"]
    outcome = run_here([*words, "--input", "age=number"], capsys)
    assert outcome.code == 1
    for said in ("PyTorch itself gives NaN", "age float32 [batch] from -", "--input age=number:"):
        assert said in " ".join(outcome.err.split())
    assert run_here([*words, "--input", "age=number:0..120"], capsys).code == 0
    (extra,) = Bundle.open(tmp_path / "a.bundle").manifest.extra_inputs
    assert (extra.lowest, extra.highest) == (0.0, 120.0)
    largest = [c.inputs["age"].max() for c in Bundle.open(tmp_path / "a.bundle").golden()]
    assert max(largest) == 120.0
