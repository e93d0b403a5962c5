import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record as records
from benchmarks.record import Refusals, make_record, merge_records, read_records, write_record


def make(mechanisms: dict[str, float], refused: str = "", rounds: int = 3) -> dict[str, Any]:
    refusals = Refusals()
    if refused:
        refusals.add(refused, 64, "peer", "cannot read: no Scan")
    rows = [{"mechanism": name, "seconds": seconds} for name, seconds in mechanisms.items()]
    made = make_record(rows, {"peer": {"title": "Peer"}}, refusals, threads=2, rounds=rounds)
    parsed: dict[str, Any] = json.loads(json.dumps(made))
    assert parsed == made
    return made


def test_second_run_adds_mechanisms() -> None:
    first, second = make({"a": 1.0, "b": 2.0}, refused="b"), make({"b": 3.0, "c": 4.0})
    merged = merge_records(first, second)
    assert [(row["mechanism"], row["seconds"]) for row in merged["rows"]] == [
        ("a", 1.0), ("b", 3.0), ("c", 4.0)
    ]  # fmt: skip
    assert merged["cannot"] == []


def test_other_setting_replaces_record() -> None:
    second = make({"b": 3.0}, rounds=5)
    assert merge_records(make({"a": 1.0}), second) == second


def test_records_are_read_by_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    early, late = make({"a": 1.0}), make({"a": 2.0})
    early["date"], late["date"] = "2026-01-01", "2026-01-02"
    write_record(early, tmp_path / "models-one.json")
    write_record(late, tmp_path / "models-two-b.json")
    write_record(late, tmp_path / "operators-two-b.json")
    assert list(read_records("models").items()) == [("two-b", late), ("one", early)]
