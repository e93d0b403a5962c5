"""The picture of the README: how many times as fast the kernels are, from the recorded runs.

PYTHONPATH=tests:tests/support .venv/bin/python -m benchmarks.speedup
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

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
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "aftexport", "font.size": 11})
    found = speedups(rows)
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for place, (contender, title) in enumerate(CONTENDERS.items()):
        ratios = [found[mechanism][contender] for mechanism in TITLES]
        heights = [row + (place - 0.5) * 0.38 for row in range(len(TITLES))]
        bars = axes.barh(heights, ratios, 0.36, color=("#2a6f97", "#a9c7d9")[place], label=title)
        axes.bar_label(bars, [label(ratio) for ratio in ratios], padding=3)
    axes.set_yticks(range(len(TITLES)), list(TITLES.values()))
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(1, 60), xlabel="times as fast (logarithmic)")
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(CONTENDERS), frameon=False)
    figure.patch.set_facecolor("white")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(RECORD.read_text("utf-8"))["rows"], PICTURE)
