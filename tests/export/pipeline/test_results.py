"""The output of an export, short, in full and for programs."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_here
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.deploy.summary import gaps, stored_report
from aftexport.engines.onnxruntime import operator_paths
from aftexport.heads import HEADS
from aftexport.pipeline.results import print_summary, print_tables
from aftexport.recognition.result import POOLING, NearMiss, Recognition, show_findings


def console() -> tuple[Console, io.StringIO]:
    return Console(file=(file := io.StringIO()), width=80, color_system=None), file


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_export_for_programs(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--factory", "tiny_models:Bag", "--to", "onnx", "--out", tmp_path / "b"]
    outcome = run_here([*words, "--no-verify", option], capsys)
    assert (outcome.code, outcome.err) == (0, "")
    if option == "--quiet":
        assert outcome.out == ""
    else:
        result = json.loads(outcome.out)
        assert (result["bundle"], result["verdict"]) == (str(tmp_path / "b"), "Not checked")
        assert [gap.partition(":")[0] for gap in result["gaps"]] == ["No tokenizer", "No names"]


def test_tables_cut_no_name(bundle_folder: Path) -> None:
    bundle = Bundle.open(bundle_folder)
    results = stored_report(bundle).comparisons
    written, file = console()
    print_tables(written, bundle, operator_paths(bundle.model_path), results)
    text = file.getvalue()
    assert "LayerNormQueryKeyValue, " in text
    assert text.count(" within ") == len(results)
    assert not any(line.startswith("error:") for line in text.splitlines())


def test_summary_of_failure_shows_only_failed_cases(bundle_folder: Path) -> None:
    bundle = Bundle.open(bundle_folder)
    results = [*stored_report(bundle).comparisons]
    results[0] = replace(results[0], error=1.0)
    written, file = console()
    print_summary(written, bundle, operator_paths(bundle.model_path), results)
    assert (file.getvalue().count("OUTSIDE"), file.getvalue().count("within")) == (1, 0)


def test_gaps_of_several_heads_name_the_output(bundle_folder: Path) -> None:
    bundle = Bundle.open(bundle_folder)
    heads = {
        "topic": HEADS["multi_label_classification"].of_width(2, None),
        "mood": HEADS["regression"].of_width(1, ["joy"]),
        "vector": HEADS["feature_extraction"].of_width(3, None),
    }
    bundle = replace(bundle, manifest=bundle.manifest.model_copy(update={"heads": heads}))
    assert gaps(bundle) == [
        "No names of topic: answers say label_0 to label_1. Export with --heads FILE."
    ]


def test_findings_join_layers_and_leave_out_pooling() -> None:
    misses = [NearMiss("aft_simple", name, "the gate is a cosine") for name in ("div", "div_1")]
    written, file = console()
    show_findings(Recognition(near_misses=[*misses, NearMiss(POOLING, "mean", "...")]), written)
    assert file.getvalue() == (
        "Not replaced: aft_simple at div and 1 more: the gate is a cosine.\n"
    )


def test_findings_of_a_mean_say_what_runs_it() -> None:
    written, file = console()
    show_findings(Recognition(near_misses=[NearMiss(POOLING, "mean", "...")]), written)
    assert file.getvalue() == (
        "No mechanism was recognized: the only sums over tokens are pooling, such as a mean, "
        "which standard operators run.\n"
    )
