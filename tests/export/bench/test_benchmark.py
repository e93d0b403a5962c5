import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from bundles import changed_manifest, resealed
from commands import assert_refused, listing, run_here, without
from rich.console import Console

import aftexport
import aftplugins
from aftexport.bench.benchmark import Timing, benchmark, check_lengths, timing_table
from aftexport.bench.timing import SLOW_ROUNDS, SLOW_SECONDS, Run, peak_mib, sample
from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime.engine import operator_shares, shares
from aftexport.errors import UsageError
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.verify.reference_model import load_source, torch_engine

Capture = pytest.CaptureFixture[str]


def test_contenders_take_turns() -> None:
    called: list[str] = []
    rounds: list[int] = []
    runs = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    seconds = sample(runs, 3, lambda: rounds.append(len(called)))
    # Each fast one is called once more before it is timed.
    assert called == list("aabb") * 3
    assert rounds == [4, 8, 12]
    assert seconds.keys() == {"a", "b"}


def test_benchmark_calls_slow_contender_less_often() -> None:
    clock = [0.0]
    called = []

    def slow() -> None:
        called.append(1)
        clock[0] += 2 * SLOW_SECONDS

    seconds = sample({"slow": slow}, 9, clock=lambda: clock[0])
    assert seconds["slow"] == pytest.approx([2 * SLOW_SECONDS] * SLOW_ROUNDS)
    # And once before it is known to be slow.
    assert len(called) == SLOW_ROUNDS + 1


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_peak_is_memory_of_one_call() -> None:
    def taking(mib: int) -> float:
        peak = peak_mib(lambda: np.ones(mib << 17))
        assert peak is not None
        return peak

    for _ in range(2):  # also where the memory was freed a moment ago
        assert 60 < taking(64) < 80  # the kernel counts in batches of pages
    assert taking(1) < 16


def test_every_length_and_contender_is_timed(bundle_folder: Path, checkpoint_file: Path) -> None:
    bundle = Bundle.open(bundle_folder)
    rounds = []
    result = benchmark(
        bundle,
        lengths=[9, 3, 9],
        threads=1,
        rounds=2,
        torch=torch_engine(bundle, load_source(bundle, checkpoint_file)),
        advance=lambda: rounds.append(1),
    )
    assert [(t.tokens, t.contender) for t in result.timings] == [
        (tokens, name) for tokens in (3, 9) for name in ("onnxruntime", "portable", "torch")
    ]
    assert len(rounds) == 4
    assert all(t.seconds > 0 for t in result.timings)
    way = "portable" if aftplugins.library("onnxruntime") is None else "fused"
    assert result.paths["AftSimple"] == way


def test_rates_follow_from_the_median() -> None:
    row = Timing("torch", 100, 0.5, None, 0.6).to_dict()
    assert row["seconds_per_token"] == pytest.approx(0.005)
    assert row["tokens_per_second"] == pytest.approx(200)


def test_shares_name_operators_and_sum_up(bundle_folder: Path) -> None:
    given = {"input_ids": np.ones((1, 2000), np.int64), "lengths": np.array([2000])}
    path = bundle_folder / "model.onnx"
    portable = operator_shares(path, given, threads=1, fused=False)
    assert sum(portable.values()) == pytest.approx(1)
    assert list(portable.values()) == sorted(portable.values(), reverse=True)
    assert "MatMul" in portable
    assert "AftSimple" not in portable
    if aftplugins.library("onnxruntime") is not None:
        assert "AftSimple" in operator_shares(path, given, threads=1)


def test_shares_come_from_undisturbed_run() -> None:
    """A run that other work held up does not enter the shares."""

    def run(start: int, gather: int, product: int) -> list[dict[str, Any]]:
        begin, middle = start + 1, start + 1 + gather
        return [
            {"name": "model_run", "ts": start, "dur": gather + product + 2},
            {"name": "a_kernel_time", "ts": begin, "dur": gather, "args": {"op_name": "Gather"}},
            {"name": "b_kernel_time", "ts": middle, "dur": product, "args": {"op_name": "MatMul"}},
        ]

    first, held_up, free = run(0, 1, 1), run(100, 900, 30), run(2000, 10, 30)
    assert shares([*first, *held_up, *free]) == {"MatMul": 0.75, "Gather": 0.25}


@pytest.mark.parametrize(
    ("limit", "given", "expected"),
    [
        (None, None, (1024, 4096, 16384)),
        (5000, None, (1024, 4096)),
        (7, None, (7,)),
        (7, [7, 1, 7], (1, 7)),
        (7, [8], None),
        (None, [0], None),
        (None, [(1 << 20) + 1], None),
    ],
)
def test_lengths_are_those_the_model_takes(
    limit: int | None, given: list[int] | None, expected: tuple[int, ...] | None,
    bundle_folder: Path,
) -> None:  # fmt: skip
    manifest = Bundle.open(bundle_folder).manifest.model_copy(update={"max_tokens": limit})
    if expected is None:
        with pytest.raises(UsageError, match="from 1 to"):
            check_lengths(manifest, given)
    else:
        assert check_lengths(manifest, given) == expected


FEW = ("--lengths", "5,40", "--rounds", "1", "--threads", "1")


def test_command_prints_and_writes_measurements(
    bundle_folder: Path, checkpoint_file: Path, tmp_path: Path, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "200")
    before = listing(bundle_folder)
    record = tmp_path / "bench.json"
    words = ["bench", bundle_folder, *FEW, "--model", checkpoint_file, "--output", record]
    outcome = run_here(words, capsys)
    assert outcome.code == 0, outcome.err
    for said in ("onnxruntime", "portable", "torch", "tokens a second", "AftSimple", "share"):
        assert said in outcome.out
    content = json.loads(record.read_text("utf-8"))
    assert {(row["tokens"], row["contender"]) for row in content["rows"]} == {
        (tokens, name) for tokens in (5, 40) for name in ("onnxruntime", "portable", "torch")
    }
    assert content["operators"].keys() >= {"AftSimple"}
    assert content["precision"] == "fp32"
    assert listing(bundle_folder) == before


def test_table_keeps_numbers_in_80_columns(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number is broken where a line has 80 characters."""
    monkeypatch.setenv("COLUMNS", "80")
    slow = Timing("torch", 1 << 20, 123.45, 12345.6, 123.45)
    fast = Timing("onnxruntime", 1 << 20, 1.0, 0.0, 1.0)
    Console().print(timing_table([fast, slow]))
    lines = capsys.readouterr().out.splitlines()
    expected = ["1,048,576", "torch", "123,450.00", "117,731", "8,494", "12,345.6", "123.45"]
    assert expected in [line.split() for line in lines]


@pytest.mark.parametrize(("slowest", "is_busy"), [(1.2, False), (2.0, True)])
def test_benchmark_reports_busy_machine(
    slowest: float, is_busy: bool, bundle_folder: Path, tmp_path: Path, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def sample(runs: Mapping[str, Run], *_: object) -> dict[str, list[float]]:
        return {name: [1.0, slowest, 1.0] for name in runs}

    monkeypatch.setattr("aftexport.bench.benchmark.sample", sample)
    record = tmp_path / "bench.json"
    outcome = run_here(["bench", bundle_folder, *FEW, "--output", record], capsys)
    assert ("One call took 2.0 times the median" in outcome.out) is is_busy
    rows = json.loads(record.read_text("utf-8"))["rows"]
    assert {(row["seconds"], row["slowest_seconds"]) for row in rows} == {(1.0, slowest)}


@pytest.mark.parametrize("against", ["none", "portable"])
def test_excluded_module_is_not_loaded(
    against: str, bundle_folder: Path, checkpoint_file: Path, capsys: Capture
) -> None:
    words = ["bench", bundle_folder, *FEW, "--against", against]
    assert "PyTorch" not in run_here(words, capsys).out
    assert "PyTorch" not in run_here([*words, "--model", checkpoint_file], capsys).out


def test_missing_module_reports_skipped_pytorch_comparison(
    bundle_folder: Path, tmp_path: Path
) -> None:
    """Without the module, the benchmark says that PyTorch was not compared."""
    words = ["bench", bundle_folder, *FEW]
    outcome = without(["torch", "onnxscript"], "aftexport", *words, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "not compared, because a bundle does not contain the module. Give --model" in outcome.out
    words += ["--against", "none"]
    outcome = without(["torch", "onnxscript"], "aftexport", *words, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "portable  " not in outcome.out.partition("operator")[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("module of tiny_models:Bag", "Give --factory tiny_models:Bag."),
        ("state dict for tiny_models:Bag", "Give --model with the file of the export, and "
         "--factory tiny_models:Bag."),
        ("pickled module", "and --allow-pickle."),
    ],
)  # fmt: skip
def test_module_error_names_options_reading_module(
    kind: str, options: str, bundle_copy: Path, capsys: Capture
) -> None:
    """The error asks for the module by the options that read it."""
    changed_manifest(bundle_copy, {"source": {"kind": kind, "sha256": None}})
    assert options in run_here(["bench", resealed(bundle_copy), *FEW], capsys).out


BAD: dict[str, tuple[list[str], str]] = {
    "too long": (["--lengths", "2000000"], "2000000"),
    "unknown contender": (["--against", "tensorflow"], "tensorflow"),
    "none among others": (["--against", "none,portable"], "none"),
    "torch without the module": (["--against", "torch"], "--model"),
    "a module that is not there": (["--model", "absent.pt"], "absent.pt"),
}


@pytest.mark.parametrize("kind", BAD)
def test_untimeable_request_is_refused(kind: str, bundle_folder: Path, capsys: Capture) -> None:
    words, said = BAD[kind]
    assert_refused(run_here(["bench", bundle_folder, *FEW, *words], capsys), said)


@pytest.mark.parametrize("lengths", ["", "0", "-1", "1,,2", "many"])
def test_bad_lengths_show_usage(lengths: str, bundle_folder: Path, capsys: Capture) -> None:
    outcome = run_here(["bench", bundle_folder, f"--lengths={lengths}"], capsys)
    assert outcome.code == 2
    assert "--lengths" in outcome.err
    assert "Traceback" not in outcome.err


def test_model_of_another_bundle_is_refused(
    bundle_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = tmp_path / "other.pt"
    torch.manual_seed(1)
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG))
    aftexport.save(other, model=model, labels=tiny_models.LABELS)
    assert_refused(run_here(["bench", bundle_folder, *FEW, "--model", other], capsys), "other.pt")


def test_document_over_model_limit_is_refused(bundle_copy: Path, capsys: Capture) -> None:
    changed_manifest(bundle_copy, {"max_tokens": 39})
    assert_refused(run_here(["bench", resealed(bundle_copy), *FEW], capsys), "40", "39")


def test_failing_length_keeps_other_lengths(tmp_path: Path, capsys: Capture) -> None:
    """The report names the length that fails and shows the others."""
    path, record = tmp_path / "bundle", tmp_path / "bench.json"
    words = [
        "--factory",
        "tiny_models:EmbeddedPositions",
        "--to",
        "onnx",
        "--out",
        path,
        "--no-verify",
    ]
    assert run_here(words, capsys).code == 0
    changed_manifest(path, {"max_tokens": 99})
    outcome = run_here(["bench", resealed(path), *FEW, "--output", record], capsys)
    assert outcome.code == 1, outcome.err
    assert "failed: onnxruntime with 40 tokens: " in outcome.out
    assert "out of data bounds" in outcome.out
    content = json.loads(record.read_text("utf-8"))
    assert {(row["tokens"], row["contender"]) for row in content["rows"]} == {
        (5, "onnxruntime"), (5, "portable")
    }  # fmt: skip
    assert [f["contender"] for f in content["failures"]] == ["onnxruntime", "portable"]
    assert content["shares"]
    outcome = run_here(["bench", path, "--lengths", "40", "--against", "none"], capsys)
    assert_refused(outcome, "out of data bounds")


def test_a_damaged_bundle_is_refused(bundle_copy: Path, capsys: Capture) -> None:
    shutil.copy(bundle_copy / "manifest.json", bundle_copy / "model.onnx")
    assert_refused(run_here(["bench", bundle_copy, *FEW], capsys), "model.onnx")
