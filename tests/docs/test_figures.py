"""The figures of the benchmark page are those of the recorded runs."""

import copy
import html
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks import pictures, tables
from benchmarks.record import FOLDER, read_records
from benchmarks.table_parts import TITLES, label

from docs.pages import PAGES, REPOSITORY

PAGE = PAGES["docs/benchmarks.md"]


def rows_of(name: str) -> list[dict[str, Any]]:
    record = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    rows: list[dict[str, Any]] = record["rows"]
    return rows


def curves(picture: Path) -> list[str]:
    """The coordinates of everything that a picture draws."""
    found = re.findall(r' (?:points|width)="([^"]+)"', picture.read_text("utf-8"))
    assert len(found) > 2 * len(TITLES)
    return found


@pytest.mark.parametrize("page", tables.PAGES)
def test_tables_match_records(page: str) -> None:
    assert tables.MARKED.search(PAGES[page])
    assert tables.filled(PAGES[page]) == PAGES[page], f"{page}: run python -m benchmarks.tables"


def test_model_picture_matches_record(tmp_path: Path) -> None:
    record = tables.widest(read_records("models"))
    pictures.draw_models(record, tmp_path / "again.svg")
    for picture in (pictures.MODELS, tmp_path / "again.svg"):
        text = html.unescape(picture.read_text("utf-8"))
        assert f"{record['processor']['title']}, {record['threads']} threads" in text
        assert record["date"] in text
        assert all(facts["title"] in text for facts in record["contenders"].values())
    assert curves(pictures.MODELS) == curves(tmp_path / "again.svg")


def test_model_picture_shows_times(tmp_path: Path) -> None:
    """The comparison of pictures notices one time that differs."""
    record = tables.widest(read_records("models"))
    changed = copy.deepcopy(record)
    changed["rows"][0]["seconds"] *= 1.1
    pictures.draw_models(changed, tmp_path / "changed.svg")
    assert curves(pictures.MODELS) != curves(tmp_path / "changed.svg")


def test_chunks_match_record() -> None:
    rows = rows_of("chunks-amd-zen-5")
    slower = [row["chunks_seconds"] / row["whole_seconds"] for row in rows]
    assert f"takes {min(slower):.1f} to {max(slower):.0f} times as long" in " ".join(PAGE.split())
    for name in ("long_seconds", "long_mib"):
        numbers = [row[name] for row in rows]
        assert f"{min(numbers):.0f} to {max(numbers):.0f} " in " ".join(PAGE.split()), name
    assert max(row["longest_part_seconds"] for row in rows) < 0.3


def test_picture_matches_record(tmp_path: Path) -> None:
    rows = rows_of("operators-amd-zen-5")
    found = pictures.speedups(rows)
    labels = [label(ratio) for pair in found.values() for ratio in pair.values()]
    pictures.draw_speedups(rows, tmp_path / "again.svg")
    for picture in (pictures.SPEEDUPS, tmp_path / "again.svg"):
        texts = re.findall(r">([\d.]+)</text>", picture.read_text("utf-8"))
        assert Counter(labels) <= Counter(texts)
    assert curves(pictures.SPEEDUPS) == curves(tmp_path / "again.svg")


def test_pictures_are_small() -> None:
    pictures = [p for p in (REPOSITORY / "docs" / "images").iterdir() if p.suffix != ".py"]
    assert {"page.png", "models.svg", "speedup.svg"} <= {picture.name for picture in pictures}
    assert all(picture.stat().st_size < 300_000 for picture in pictures)
