"""The picture of whole models: time against tokens, for all contenders of a record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.plot import MARKERS, Panel, Style, draw
from benchmarks.titles import TITLES
from benchmarks.workloads import SOFTMAX

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "models.svg"
_COLORS = {"aftexport": "blue", "openvino": "red", "ort": "green", "torch": "violet"}
_DASHES = {"fp32": "solid", "bf16": "dashed", "int8": "dotted"}
_SOFTMAX = "softmax, best peer"


def draw_models(record: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each mechanism, with the softmax encoder in its best contender."""
    panels = []
    for mechanism, title in TITLES.items():
        curves = {
            facts["title"]: points(record, mechanism, name)
            for name, facts in record["contenders"].items()
        }
        curves[_SOFTMAX] = softmax_points(record)
        panels.append(Panel(title, {name: curve for name, curve in curves.items() if curve}))
    title = (
        f"Milliseconds of a four-layer model: {record['processor']['title']}, "
        f"{record['threads']} threads, {record['date']}"
    )
    draw(title, panels, _styles(record), path, columns=4)


def points(record: Mapping[str, Any], mechanism: str, contender: str) -> list[tuple[int, float]]:
    """Return tokens and milliseconds of a contender, by length."""
    return sorted(
        (row["tokens"], row["seconds"] * 1e3)
        for row in record["rows"]
        if (row["mechanism"], row["contender"]) == (mechanism, contender)
    )


def softmax_points(record: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return tokens and milliseconds of the softmax encoder in its fastest contender, by length."""
    best: dict[int, float] = {}
    for row in record["rows"]:
        if row["mechanism"] == SOFTMAX:
            milliseconds = row["seconds"] * 1e3
            best[row["tokens"]] = min(best.get(row["tokens"], milliseconds), milliseconds)
    return sorted(best.items())


def _styles(record: Mapping[str, Any]) -> dict[str, Style]:
    """Return a color for each family, a dash for each precision, a marker in order."""
    styles: dict[str, Style] = {}
    shown: dict[str, int] = {}
    markers = list(MARKERS)[:-1]
    for name, facts in record["contenders"].items():
        family = name.partition("_")[0]
        place = shown[family] = shown.get(family, -1) + 1
        styles[facts["title"]] = Style(
            _COLORS[family], _DASHES[facts["precision"]], markers[place % len(markers)],
            2 if facts["is_ours"] else 1.2,
        )  # fmt: skip
    return styles | {_SOFTMAX: Style("gray", "dashed", "cross")}
