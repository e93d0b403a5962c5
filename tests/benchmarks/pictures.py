"""The pictures of README and documentation: times of whole models, and speedups of kernels."""

import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from aftexport.parity.plots import LogAxis
from benchmarks.plot import COLORS, MARKERS, Panel, Style, draw, svg, text
from benchmarks.record import FOLDER
from benchmarks.table_parts import PRECISIONS, TITLES, best_peer, grouped, label
from benchmarks.workloads import SOFTMAX

Row = Mapping[str, Any]
IMAGES = Path(__file__).parents[2] / "docs" / "images"
MODELS, RATIOS, SPEEDUPS = (IMAGES / f"{n}.svg" for n in ("models", "ratios", "speedup"))
CONTENDERS = {"torch_compile": "over torch.compile", "ort_portable": "over its ONNX fallback"}
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
    styles = contender_styles(record) | {_SOFTMAX: Style("gray", "dashed", "cross")}
    draw(title, panels, styles, path, columns=4)


def draw_ratios(record: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each precision: the time of the best peer over ours, by length."""
    panels = [Panel(precision, ratios(record, precision)) for precision in PRECISIONS]
    title = (
        f"Times as fast as the best peer: {record['processor']['title']}, "
        f"{record['threads']} threads, {record['date']}"
    )
    styles = {title: Style(c) for title, c in zip(TITLES.values(), cycle(COLORS), strict=False)}
    draw(title, [panel for panel in panels if panel.curves], styles, path, columns=4)


def ratios(record: Mapping[str, Any], precision: str) -> dict[str, list[tuple[float, float]]]:
    """Return tokens and the best peer's time over ours, by the title of a mechanism."""
    found: dict[str, list[tuple[float, float]]] = {}
    for (mechanism, tokens), group in sorted(grouped(record["rows"]).items()):
        ours = group.get(f"aftexport_{precision}")
        best = best_peer(group.values(), record["contenders"], precision)
        if ours and best:
            point = tokens, best["seconds"] / ours["seconds"]
            found.setdefault(TITLES[mechanism], []).append(point)
    return found


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


def contender_styles(record: Mapping[str, Any]) -> dict[str, Style]:
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
    return styles


def speedups(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return, for each mechanism at its longest document, the time of each contender over ours."""
    found = {}
    for mechanism in TITLES:
        own = [row for row in rows if row["mechanism"] == mechanism]
        longest = max(row["tokens"] for row in own)
        seconds = {r["contender"]: r["seconds"] for r in own if r["tokens"] == longest}
        found[mechanism] = {c: seconds[c] / seconds["aftexport_fp32"] for c in CONTENDERS}
    return found


def draw_speedups(rows: Sequence[Row], path: Path) -> None:
    """Draw two bars for each mechanism."""
    found = speedups(rows)
    ticks = (1, 2, 5, 10, 20, 50)
    bottom = 40.0 + 40 * len(TITLES)
    axis = LogAxis(1, 60, 150, 640)
    lines = "".join(f"M{axis.place(tick):.1f} 36V{bottom}" for tick in ticks)
    body = [f'<path class="grid" d="{lines}"/>']
    for place, (contender, title) in enumerate(CONTENDERS.items()):
        fill = f'style="fill: var(--{("blue", "pale")[place]})"'
        x = 200 + 220 * place
        body += [f'<rect x="{x}" y="10" width="14" height="14" {fill}/>', text(x + 22, 22, title)]
        for row, mechanism in enumerate(TITLES):
            ratio, y = found[mechanism][contender], 42 + 40 * row + 17 * place
            width = axis.place(ratio) - axis.start
            body.append(
                f'<rect x="{axis.start:g}" y="{y}" width="{width:.1f}" height="15" {fill}/>'
            )
            body.append(text(axis.place(ratio) + 5, y + 12, label(ratio)))
    body += [text(axis.start - 8, 63 + 40 * row, title, "e")
             for row, title in enumerate(TITLES.values())]  # fmt: skip
    body += [text(axis.place(tick), bottom + 18, f"{tick} times", "m") for tick in ticks]
    body.append(text((axis.start + axis.end) / 2, bottom + 38, "as fast (logarithmic)", "m"))
    path.write_text(svg(680, bottom + 50, body, size=13), "utf-8")


def draw_all(record: Mapping[str, Any]) -> None:
    """Draw the models of a record, and the speedups of the operators' record on Zen 5."""
    draw_models(record, MODELS)
    draw_ratios(record, RATIOS)
    operators = json.loads((FOLDER / "operators-amd-zen-5.json").read_text("utf-8"))
    draw_speedups(operators["rows"], SPEEDUPS)
