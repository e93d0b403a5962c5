"""The picture of the README: how many times as fast the kernels are, from the recorded runs.

PYTHONPATH=tests:tests/support .venv/bin/python -m benchmarks.speedup
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aftexport.report.plots import LogAxis
from benchmarks.plot import svg, text
from benchmarks.titles import TITLES, label

Row = Mapping[str, Any]
RECORD = Path(__file__).parent / "records" / "operators-amd-zen-5.json"
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "speedup.svg"
CONTENDERS = {"torch_compile": "over torch.compile", "ort_portable": "over its ONNX fallback"}


def speedups(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return, for each mechanism at its longest document, the time of each contender over ours.

    Args:
        rows: the rows of a record.
    """
    found = {}
    for mechanism in TITLES:
        own = [row for row in rows if row["mechanism"] == mechanism]
        longest = max(row["tokens"] for row in own)
        seconds = {r["contender"]: r["seconds"] for r in own if r["tokens"] == longest}
        found[mechanism] = {c: seconds[c] / seconds["aftexport_fp32"] for c in CONTENDERS}
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw two bars for each mechanism.

    Args:
        rows: the rows of a record.
        path: the SVG file.
    """
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


if __name__ == "__main__":
    draw(json.loads(RECORD.read_text("utf-8"))["rows"], PICTURE)
