"""The picture of whole models: time against tokens, for all contenders of a record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.titles import TITLES
from benchmarks.workloads import SOFTMAX

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "models.svg"
COLUMNS = 4
_COLORS = {"aftexport": "#2a6f97", "openvino": "#d1495b", "ort": "#66a182", "torch": "#8d6b94"}
_STYLES = {"fp32": "-", "bf16": "--", "int8": ":"}
_MARKERS = ("o", "s", "^", "D", "v", "P")


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each mechanism, and the softmax encoder in its best contender.

    Args:
        record: a record of models.
        path: the SVG file.
    """
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "aftexport", "font.size": 10})
    rows = -(-(len(TITLES) + 1) // COLUMNS)
    figure, panels = plt.subplots(
        rows, COLUMNS, figsize=(13, 3.4 * rows), sharex=True, sharey=True, layout="constrained"
    )
    axes = list(panels.flat)
    for panel, (mechanism, title) in zip(axes, TITLES.items(), strict=False):
        _draw_mechanism(panel, record, mechanism)
        panel.set_title(title)
    legend = axes[len(TITLES)]
    handles, labels = _all_handles(axes[: len(TITLES)])
    legend.legend(handles, labels, loc="center", fontsize="small", frameon=False)
    legend.axis("off")
    processor = record["processor"]
    figure.suptitle(
        f"Milliseconds of a four-layer model: {processor['title']}, {record['threads']} threads, "
        f"{record['date']}"
    )
    figure.supxlabel("tokens")
    figure.patch.set_facecolor("white")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


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


def _draw_mechanism(panel: Axes, record: Mapping[str, Any], mechanism: str) -> None:
    shown: dict[str, int] = {}
    for name, facts in record["contenders"].items():
        family = name.partition("_")[0]
        marker = _MARKERS[shown.setdefault(family, 0) % len(_MARKERS)]
        shown[family] += 1
        if line := points(record, mechanism, name):
            panel.plot(
                *zip(*line, strict=True), label=facts["title"], color=_COLORS[family],
                linestyle=_STYLES[facts["precision"]], marker=marker, markersize=4,
                linewidth=2 if facts["is_ours"] else 1.2,
            )  # fmt: skip
    if softmax := softmax_points(record):
        panel.plot(*zip(*softmax, strict=True), "x-.", color="#777777", label="softmax, best peer")
    lengths = sorted({row["tokens"] for row in record["rows"]})
    panel.set(xscale="log", yscale="log")
    panel.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    panel.xaxis.minorticks_off()
    panel.grid(alpha=0.3)


def _all_handles(panels: list[Axes]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
