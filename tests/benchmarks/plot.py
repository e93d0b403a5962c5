"""Time and memory against the length of the document."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

from benchmarks.record import Row

_PANELS: dict[str, Callable[[Row], float | None]] = {
    "nanoseconds a token": lambda row: row["seconds"] / row["tokens"] * 1e9,
    "peak MiB of a call": lambda row: row["peak_mib"],
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw aftexport solid and torch.compile dashed, one color for each mechanism."""
    figure, panels = plt.subplots(1, len(_PANELS), figsize=(13, 5.5), layout="constrained")
    mechanisms = list(dict.fromkeys(row["mechanism"] for row in rows))
    for axes, (title, value) in zip(panels, _PANELS.items(), strict=True):
        for index, mechanism in enumerate(mechanisms):
            for contender, style in (("aftexport_fp32", "o-"), ("torch_compile", "x--")):
                line = [r for r in rows
                        if (r["mechanism"], r["contender"]) == (mechanism, contender)]  # fmt: skip
                label = mechanism if contender == "aftexport_fp32" else None
                axes.plot(
                    [r["tokens"] for r in line], [value(r) for r in line],
                    style, color=f"C{index}", label=label,
                )  # fmt: skip
        lengths = sorted({row["tokens"] for row in rows})
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].legend(title="aftexport —, torch.compile - -", fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
