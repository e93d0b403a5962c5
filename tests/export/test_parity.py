import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import listing, run_here

from aftexport import parity
from aftexport.bundle import Bundle, write_json
from aftexport.parity import (
    TOLERANCES,
    Case,
    Comparison,
    Tolerance,
    compare,
    pack_cases,
    unpack_cases,
)
from aftexport.registry import ALL_OPERATORS
from aftexport.report import write_parity_page
from aftexport.verification import verify, worst

IDS = {"input_ids": np.zeros((2, 3), np.int64)}


def compared(output: object, expected: object, subject: str = "model") -> Comparison:
    inputs = IDS if subject == "model" else {"query": np.zeros((2, 3, 1)), "lengths": [3, 1]}
    return compare(
        Case("c", subject, inputs, np.asarray(expected)),  # type: ignore[arg-type]
        np.asarray(output),
        "fp32",
    )


def test_the_error_is_relative_only_to_what_is_larger_than_one() -> None:
    assert compared([[1000.05, 0.0]], [[1000.0, 0.0]]).error == pytest.approx(5e-5)
    assert compared([[0.05, 0.0]], [[0.0, 0.0]]).error == pytest.approx(0.05)
    assert compared([[2.0, 1.0]], [[1.0, 2.0]]).label_flips == 1


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([[np.nan, 0.0]], [[1.0, 0.0]]),
        ([[np.inf, 0.0]], [[1.0, 0.0]]),
        ([[np.inf, 0.0]], [[np.inf, 0.0]]),
        ([[1.0, 0.0]], [[np.nan, 0.0]]),
        ([[np.nan, 0.0]], [[np.nan, 0.0]]),
        ([[1.0, 0.0, 0.0]], [[1.0, 0.0]]),
        ([1.0, 0.0], [[1.0, 0.0]]),
        ([[1.0, 0.0]] * 2, [[1.0, 0.0]]),
    ],
)
def test_what_cannot_be_compared_never_passes(output: object, expected: object) -> None:
    result = compared(output, expected)
    assert not result.passed
    fine = compared([[1.0]], [[1.0]])
    assert worst([fine, result]) is result
    assert worst([result, fine]) is result


@pytest.mark.parametrize("error", [0.0, 1e-9, float("inf")])
def test_a_comparison_survives_json(error: float, tmp_path: Path) -> None:
    before = Comparison("c", "model", (2, 3), error, 1e-4, 1)
    write_json(tmp_path / "parity.json", before.to_dict())
    content = json.loads((tmp_path / "parity.json").read_text(), parse_constant=pytest.fail)
    assert Comparison.from_dict(content) == before


def test_rows_of_padding_do_not_count_for_an_operator_alone() -> None:
    expected, output = np.zeros((2, 3, 1)), np.zeros((2, 3, 1))
    output[1, 1:] = 9
    assert compared(output, expected, "AftSimple").passed
    output[1, 0] = 9
    assert not compared(output, expected, "AftSimple").passed


def test_cases_survive_packing_the_models_first() -> None:
    cases = [
        Case("b", "AftSimple", {"query": np.ones((1, 1))}, np.ones((1, 1))),
        Case("z", "model", IDS, np.ones((2, 3))),
        Case("a", "model", IDS, np.ones((2, 3))),
    ]
    read = unpack_cases(pack_cases(cases))
    assert [(case.subject, case.name) for case in read] == [
        ("model", "a"), ("model", "z"), ("AftSimple", "b")
    ]  # fmt: skip
    np.testing.assert_array_equal(read[0].inputs["input_ids"], IDS["input_ids"])


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


def test_a_model_that_differs_is_kept_aside_and_reported(
    differing: object,
    checkpoint_file: Path,
    bundle_copy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
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


def test_a_folder_that_is_no_bundle_is_not_replaced_by_a_failed_one(
    checkpoint_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    strict_table(monkeypatch)
    (tmp_path / "out.failed").mkdir()
    (tmp_path / "out.failed" / "notes.txt").write_text("mine")
    outcome = run_here([checkpoint_file, "--to", "onnx", "--out", tmp_path / "out"], capsys)
    assert outcome.code in (1, 2)
    assert (tmp_path / "out.failed" / "notes.txt").read_text() == "mine"


def test_a_bundle_altered_after_export_fails_verification(
    bundle_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnx
    from bundles import resealed

    model = onnx.load(bundle_copy / "model.onnx")
    bias = next(t for t in model.graph.initializer if t.name == "head.bias")
    values = onnx.numpy_helper.to_array(bias) + 1
    bias.CopyFrom(onnx.numpy_helper.from_array(values, "head.bias"))
    onnx.save(model, bundle_copy / "model.onnx")
    outcome = run_here(["verify", resealed(bundle_copy)], capsys)
    assert outcome.code == 1
    assert "OUTSIDE" in outcome.out


def test_the_cases_strain_every_operator_and_many_lengths(bundle_folder: Path) -> None:
    results = verify(Bundle.open(bundle_folder), fused=False)
    assert all(result.passed for result in results)
    assert {result.subject for result in results} >= {"model", "AftSimple"}
    assert {"one token", "padded batch", "prime length", "long"} <= {r.case for r in results}


def test_every_bound_is_given_a_reason() -> None:
    for tolerance in TOLERANCES.values():
        assert 0 < tolerance.bound < 0.1
        assert tolerance.reason


def test_the_page_escapes_what_it_shows(bundle_folder: Path, tmp_path: Path) -> None:
    manifest = Bundle.open(bundle_folder).manifest
    result = Comparison("<script>", "<b>", (1,), float("nan"), 1e-4, 0)
    write_parity_page(tmp_path / "page.html", manifest, [result])
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "OUTSIDE" in page


def test_the_page_of_a_bundle_not_checked_says_so(bundle_folder: Path, tmp_path: Path) -> None:
    write_parity_page(tmp_path / "page.html", Bundle.open(bundle_folder).manifest, [])
    assert "within tolerance" not in (tmp_path / "page.html").read_text("utf-8")
