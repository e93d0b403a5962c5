import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record as records
from benchmarks.record import (
    RecordError,
    Refusals,
    make_record,
    read_earlier,
    read_records,
    read_setting,
    write_record,
)

Times = dict[tuple[str, int], float]


def make(
    times: Times, refused: str = "", rounds: int = 3, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    refusals = Refusals()
    if refused:
        refusals.add(refused, 64, "peer", "cannot read: no Scan")
    rows = [{"mechanism": m, "tokens": n, "seconds": each} for (m, n), each in times.items()]
    setting = read_setting({"peer": {"title": "Peer"}}, threads=2, rounds=rounds)
    made = make_record(setting, rows, refusals, earlier)
    parsed: dict[str, Any] = json.loads(json.dumps(made))
    assert parsed == made
    return made


def test_second_run_replaces_length() -> None:
    first = make({("a", 64): 1.0, ("b", 64): 2.0, ("b", 128): 5.0}, refused="b")
    merged = make({("b", 64): 3.0, ("c", 64): 4.0}, earlier=first)
    assert [(row["mechanism"], row["tokens"], row["seconds"]) for row in merged["rows"]] == [
        ("a", 64, 1.0), ("b", 128, 5.0), ("b", 64, 3.0), ("c", 64, 4.0)
    ]  # fmt: skip
    assert merged["cannot"] == []


@pytest.mark.parametrize("name", ["date", "commit", "threads", "versions", "contenders"])
def test_rows_of_other_setting_are_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / "models-some.json"
    setting = read_setting({}, threads=2, rounds=3)
    assert read_earlier(path, setting, replace=False) is None
    record = make_record(setting, [{"mechanism": "a", "tokens": 64}], Refusals())
    write_record(record, path)
    assert read_earlier(path, setting, replace=False) == record
    write_record(record | {name: "another"}, path)
    message = rf"Expected in models-some.json .*, got 1 rows with another {name}\. Pass --replace"
    with pytest.raises(RecordError, match=message):
        read_earlier(path, setting, replace=False)
    assert read_earlier(path, setting, replace=True) is None


def test_rows_have_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "models-some.json"
    record = make({("a", 64): 1.0, ("b", 64): 2.0}, refused="b")
    write_record(record, path)
    text = path.read_text("utf-8")
    assert json.loads(text) == record
    assert (
        text.count("\n")
        == len(record)
        + sum(len(record[name]) + 1 for name in ("contenders", "commands", "cannot", "rows"))
        + 2
    )


def test_records_are_read_by_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    early, late = make({("a", 64): 1.0}), make({("a", 64): 2.0})
    early["date"], late["date"] = "2026-01-01", "2026-01-02"
    write_record(early, tmp_path / "models-one.json")
    write_record(late, tmp_path / "models-two-b.json")
    write_record(late, tmp_path / "operators-two-b.json")
    assert list(read_records("models").items()) == [("two-b", late), ("one", early)]
