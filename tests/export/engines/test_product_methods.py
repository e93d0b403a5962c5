"""The methods of a bundle's products, as commands show them."""

import json
from pathlib import Path

import pytest
from commands import Capture, assert_refused, run_here, run_python

import aftplugins
from aftexport.engines.product_methods import product_methods
from aftplugins.methods import choose

pytestmark = pytest.mark.skipif(
    aftplugins.library("onnxruntime") is None, reason="no fused kernels"
)


@pytest.fixture
def int8_bundle(checkpoint_file: Path, tmp_path: Path, capsys: Capture) -> Path:
    out = tmp_path / "int8.bundle"
    words = [checkpoint_file, "--to", "onnx", "--precision", "int8", "--out", out]
    assert run_here(words, capsys).code == 0
    return out


def test_file_without_products_has_no_methods(bundle_folder: Path) -> None:
    assert product_methods(bundle_folder / "model.onnx", "int8") == ()


def test_full_precision_reads_no_file(tmp_path: Path) -> None:
    assert product_methods(tmp_path / "absent.onnx", "fp32") == ()


def test_inspect_and_bench_show_methods(int8_bundle: Path, capsys: Capture) -> None:
    choices = product_methods(int8_bundle / "model.onnx", "int8")
    assert choices
    assert {choice.precision for choice in choices} == {"int8"}
    for choice in choices:
        width = choice.products.removeprefix("encoder_")
        assert choice == choose("int8", int(width))
    results = int8_bundle.with_suffix(".json")
    bench = ["bench", int8_bundle, "--lengths", "16", "--rounds", "1", "--output", results]
    for words in (["inspect", int8_bundle], bench):
        shown = run_here(words, capsys).out
        for choice in choices:
            assert choice.products in shown
            for method, rate in choice.rates.items():
                assert f"{method} {rate:.1f}" in shown
    recorded = json.loads(results.read_text())["methods"]
    assert [tuple(entry["methods"]) for entry in recorded] == [c.methods for c in choices]


def test_unknown_method_is_refused(int8_bundle: Path, tmp_path: Path) -> None:
    words = ("-m", "aftexport", "inspect", int8_bundle)
    outcome = run_python(*words, cwd=tmp_path, AFTEXPORT_METHOD="int4")
    assert_refused(outcome, "AFTEXPORT_METHOD", "int4", "fp32", "Unset")
