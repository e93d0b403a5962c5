"""The measurement of recurrent linear attention: its contenders, work, memory and tables."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from aftexport.bench.timing import peak_mib
from benchmarks.recurrent import run as recurrent
from benchmarks.recurrent.contenders import (
    CONTENDERS,
    OPERATOR,
    OURS,
    RULES,
    Recurrence,
    preparation,
)
from benchmarks.recurrent.run import beyond_mib
from benchmarks.recurrent.tables import (
    bound_of,
    recurrent_tables,
    with_best_rates,
)


def as_written(function: Any) -> Any:
    """Compile nothing: the chunked form itself takes milliseconds."""
    return function


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rule", RULES)
def test_contenders_compute_definition(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunked form passes its state from section to section."""
    monkeypatch.setattr("benchmarks.recurrent.chunked_form._SECTION", 2)
    workload = Recurrence(rule, 2, 320, 2, 16)
    feeds = workload.feeds()
    tensors = {name: torch.from_numpy(x).double() for name, x in feeds.items()}
    tensors["lengths"] = torch.full((2,), 320)
    inputs = [tensors.get(name) for name in OPERATOR.inputs]
    expected = OPERATOR.reference(*inputs, **workload.attributes)[0].numpy()
    for name in CONTENDERS:
        output = preparation(name, workload, feeds, as_written)(1)()
        np.testing.assert_allclose(np.asarray(output), expected, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("rule", RULES)
def test_work_is_that_of_definition(rule: str) -> None:
    """The counter sees every product but the outer one, which changes the state."""
    workload = Recurrence(rule, 2, 20, 3, 8)
    feeds = workload.feeds()
    tensors = {name: torch.from_numpy(x) for name, x in feeds.items()}
    tensors["lengths"] = torch.full((2,), 20)
    with FlopCounterMode(display=False) as counter:
        output, _ = OPERATOR.reference(
            *(tensors.get(name) for name in OPERATOR.inputs), **workload.attributes
        )
    outer = 2 * 20 * 3 * 8 * 8
    assert workload.multiply_adds == counter.get_total_flops() / 2 + outer
    assert workload.bytes_moved == sum(x.nbytes for x in feeds.values()) + output.nbytes


@pytest.mark.skipif(peak_mib(lambda: None) is None, reason="the kernel counts no peak")
def test_memory_of_kernel_is_flat() -> None:
    """The portable body, whose memory grows with the tokens, shows that growth is noticed."""
    short, long = (Recurrence("gated_delta", 1, tokens, 4, 32) for tokens in (2_048, 8_192))
    output_mib = 8_192 * 4 * 32 * 4 / 2**20
    ours = beyond_mib(OURS, short, 1), beyond_mib(OURS, long, 1)
    assert all(mib is not None and mib < output_mib / 4 for mib in ours), ours
    body = beyond_mib("body", long, 1)
    assert body is not None
    assert body > output_mib


def test_run_writes_record_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "SHAPES", ((1, 64, 2, 16), (2, 64, 1, 32)))
    monkeypatch.setattr(recurrent, "MEMORY_TOKENS", (64, 128))
    monkeypatch.setattr(recurrent, "measure_memory", memory_here)
    out = tmp_path / "recurrent-some.json"
    options = argparse.Namespace(
        rounds=1, tokens=None, contender=[OURS, "onnxruntime"], record=False, replace=False,
        out=out, threads=2,
    )  # fmt: skip
    recurrent.run(options, Console(quiet=True))
    record = json.loads(out.read_text("utf-8"))
    assert len(record["rows"]) == len(RULES) * 2 * 2 * 2
    assert {(row["threads"], row["clock"]) for row in record["rows"]} == {
        (2, "wall"), (1, "processor")
    }  # fmt: skip
    assert {"load", "commands", "processor", "versions"} <= record.keys()
    monkeypatch.setattr("benchmarks.recurrent.tables.read_records", lambda kind: {"some": record})
    text = recurrent_tables()
    assert text.count("| time over the bound |") == 4
    assert text.count("64 tokens, one head of 32 channels") == 2
    assert "| our kernel, 128 tokens |" in text


def memory_here(names: list[str], workloads: list[Recurrence], threads: int) -> list[Any]:
    """Measure in this process: pytest has threads, and cannot fork."""
    return [
        {"contender": name, "rule": w.rule, "tokens": w.tokens,
         "beyond_mib": beyond_mib(name, w, threads)}
        for name in names for w in workloads
    ]  # fmt: skip


def row(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "memory_seconds": 0.002, "multiply_add_seconds": 0.004}


def test_bound_is_longer_part() -> None:
    assert bound_of(row(1.0)) == (0.004, "multiply-adds")
    assert bound_of(row(1.0) | {"memory_seconds": 0.1}) == (0.1, "memory")


def test_bound_is_by_best_rates_of_run() -> None:
    """A rate that other work slowed would put the bound above the times."""
    fast, slow = {"fp32": 100.0, "copy": 15.0}, {"fp32": 50.0, "copy": 30.0}
    rows = [row(1.0) | {"threads": 2, "limits": limits} for limits in (fast, slow)]
    alone = row(1.0) | {"threads": 1, "limits": slow}
    first, second, third = with_best_rates([*rows, alone])
    best = {"fp32": 100.0, "copy": 30.0}
    assert first == rows[0] | {"limits": best, "memory_seconds": 0.001}
    assert second == rows[1] | {"limits": best, "multiply_add_seconds": 0.002}
    assert third == alone
