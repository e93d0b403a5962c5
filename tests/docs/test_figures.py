"""The figures of the benchmark page are those of the recorded runs."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks import speedup

from docs.pages import PAGES, REPOSITORY

PAGE = PAGES["docs/benchmarks.md"]
CONTENDERS = {"over `torch.compile`": "torch_compile", "over the fallback": "ort_portable"}
PRECISIONS = ("fp32", "bf16", "int8")
Seconds = dict[tuple[str, int], dict[str, float]]


def rows_of(name: str) -> list[dict[str, Any]]:
    record = json.loads((speedup.RECORD.parent / f"{name}.json").read_text("utf-8"))
    rows: list[dict[str, Any]] = record["rows"]
    return rows


def seconds_of(rows: Iterable[Mapping[str, Any]]) -> Seconds:
    """Seconds by mechanism and tokens, then by contender."""
    found: Seconds = {}
    for row in rows:
        times = found.setdefault((row["mechanism"], row["tokens"]), {})
        times[row["contender"]] = row["seconds"]
    return found


def has_row(title: str, cells: Iterable[str]) -> bool:
    return f"| {title} | {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize(
    ("record", "tokens"), [("record", 16_384), ("record", 65_536), ("avx2_record", 16_384)]
)
@pytest.mark.parametrize("title", CONTENDERS)
def test_operators_match_record(record: str, tokens: int, title: str) -> None:
    times = [t for (_, n), t in seconds_of(rows_of(record)).items() if n == tokens]
    assert len(times) == 6
    cells = [speedup.label(t[CONTENDERS[title]] / t["aftexport"]) for t in times]
    assert has_row(title, cells), cells


@pytest.mark.parametrize(
    ("record", "tokens"), [("record", 16_384), ("record", 65_536), ("avx2_record", 16_384)]
)
def test_limits_match_record(record: str, tokens: int) -> None:
    own = [r for r in rows_of(record) if r["contender"] == "aftexport" and r["tokens"] == tokens]
    cells = [speedup.label(row["seconds"] / row["limit_seconds"]) for row in own]
    assert has_row("time over the limit", cells), cells


def ratios(times: Seconds, base: str, contender: str) -> list[str]:
    """For each mechanism, the time of one contender over that of another, by length."""
    found: dict[str, list[str]] = {}
    for (mechanism, _), seconds in times.items():
        ratio = speedup.label(seconds[base] / seconds[contender])
        found.setdefault(mechanism, []).append(ratio)
    return [", ".join(cells) for cells in found.values()]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("record", ["model_record", "avx2_model_record"])
def test_models_match_record(record: str, precision: str) -> None:
    cells = ratios(seconds_of(rows_of(record)), "ort_portable", f"aftexport_{precision}")
    assert has_row(precision, cells), cells


def test_autocast_matches_record() -> None:
    times = seconds_of(rows_of("model_record"))
    cells = ratios(times, "torch_compile_bf16", "aftexport_bf16")
    assert has_row("bf16, over autocast", cells), cells


def test_chunks_match_record() -> None:
    rows = rows_of("chunks_record")
    slower = [row["chunks_seconds"] / row["whole_seconds"] for row in rows]
    assert f"takes {min(slower):.1f} to {max(slower):.0f} times as long" in " ".join(PAGE.split())
    for name in ("long_seconds", "long_mib"):
        numbers = [row[name] for row in rows]
        assert f"{min(numbers):.0f} to {max(numbers):.0f} " in " ".join(PAGE.split()), name
    assert max(row["longest_part_seconds"] for row in rows) < 0.3


def test_picture_matches_record(tmp_path: Path) -> None:
    rows = rows_of("record")
    found = speedup.speedups(rows)
    labels = [speedup.label(ratio) for pair in found.values() for ratio in pair.values()]
    speedup.draw(rows, tmp_path / "again.svg")
    for picture in (speedup.PICTURE, tmp_path / "again.svg"):
        texts = re.findall(r">([\d.]+)</text>", picture.read_text("utf-8"))
        assert Counter(labels) <= Counter(texts)


def test_pictures_are_small() -> None:
    pictures = [p for p in (REPOSITORY / "docs" / "images").iterdir() if p.suffix != ".py"]
    assert {"page.png", "speedup.svg"} <= {picture.name for picture in pictures}
    assert all(picture.stat().st_size < 300_000 for picture in pictures)
