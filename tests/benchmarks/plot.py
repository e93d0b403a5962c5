"""Pictures of the benchmarks: panels of curves with logarithmic axes, as SVG."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from math import ceil, floor, log10
from pathlib import Path

from aftexport.parity.plots import LogAxis

COLORS = {
    "blue": ("#2a6f97", "#6cb4dd"),
    "red": ("#d1495b", "#f28b97"),
    "green": ("#4f8a6b", "#8fd3ab"),
    "violet": ("#8d6b94", "#cfa8d6"),
    "gray": ("#777777", "#aaaaaa"),
    "orange": ("#c46a1b", "#f0a35e"),
    "teal": ("#13817d", "#5cc9c3"),
    "pale": ("#a9c7d9", "#3f647c"),
}
"""Each color on a light and on a dark background."""
DASHES = {"solid": "", "dashed": "6 3", "dotted": "1.5 3"}
MARKERS = {
    "circle": "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0", "square": "M-3-3h6v6h-6z",
    "triangle": "M0-4L4 3h-8z", "diamond": "M0-4L4 0 0 4-4 0z", "down": "M0 4L4-3h-8z",
    "bar": "M-1-4h2v8h-2z", "cross": "M-1-4h2v3h3v2h-3v3h-2v-3h-3v-2h3z",
}  # fmt: skip
_PAPER = """\
svg {{ font: {size}px sans-serif; --paper: #ffffff; --ink: #222222; --grid: #e2e2e2; {light} }}
@media (prefers-color-scheme: dark) {{
svg {{ --paper: #16191d; --ink: #e6e6e6; --grid: #3a3f45; {dark} }}
}}
text {{ fill: var(--ink); }} .m {{ text-anchor: middle; }} .e {{ text-anchor: end; }}
.grid {{ stroke: var(--grid); }} .curve {{ fill: none; }}"""


@dataclass(frozen=True)
class Style:
    """The look of a curve in every panel, by keys of the tables above."""

    color: str
    dash: str = "solid"
    marker: str = "circle"
    width: float = 1.2


@dataclass
class Panel:
    """Curves in a frame: their points, all positive, by the name of their style."""

    title: str
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def svg(width: float, height: float, body: Iterable[str], size: float = 12) -> str:
    """Return a picture whose colors follow the reader's light or dark scheme."""
    light, dark = (
        " ".join(f"--{name}: {pair[scheme]};" for name, pair in COLORS.items()) for scheme in (0, 1)
    )
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">',
        f"<style>\n{_PAPER.format(size=size, light=light, dark=dark)}\n</style>",
        '<rect width="100%" height="100%" style="fill: var(--paper)"/>',
        *body, "</svg>\n",
    ])  # fmt: skip


def text(x: float, y: float, words: str, anchor: str = "") -> str:
    """Return a text that starts, has its middle (m) or ends (e) at a point."""
    kind = f' class="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(words)}</text>'


def compared_styles(mechanisms: Sequence[str], other: str) -> dict[str, Style]:
    """Return a color for each mechanism: ours is solid, and the other contender's is dashed."""
    styles = {}
    for mechanism, color in zip(mechanisms, cycle(COLORS), strict=False):
        styles[mechanism] = Style(color)
        styles[f"{mechanism}, {other}"] = Style(color, "dashed", "cross")
    return styles


def draw(
    title: str,
    panels: Sequence[Panel],
    styles: Mapping[str, Style],
    path: Path,
    *,
    columns: int,
    has_common_y: bool = True,
) -> None:
    """Draw panels of the same lengths, with the same range if ``has_common_y``, and the legend."""
    shown = [name for name in styles if any(name in panel.curves for panel in panels)]
    lengths = sorted({x for panel in panels for curve in panel.curves.values() for x, _ in curve})
    width, height, top = 300.0, max(240.0, 18.0 * len(shown) + 60), 36.0
    rows = ceil((len(panels) + 1) / columns)
    body = [_marker(number, styles[name]) for number, name in enumerate(shown)]
    body.append(text(columns * width / 2, 22, title, "m"))
    for place, panel in enumerate(panels):
        left, upper = place % columns * width, top + place // columns * height
        ticks = _round_values(panels if has_common_y else [panel])
        x = LogAxis(lengths[0] * 0.8, lengths[-1] * 1.25, left + 52, left + width - 12)
        y = LogAxis(ticks[0], ticks[-1], upper + height - 42, upper + 24)
        body += _frame(panel.title, x, y, lengths, ticks)
        for number, name in enumerate(shown):
            if curve := panel.curves.get(name):
                placed = [(x.place(length), y.place(value)) for length, value in curve]
                body.append(_curve(number, styles[name], placed))
    left, upper = len(panels) % columns * width, top + len(panels) // columns * height
    for number, name in enumerate(shown):
        line = upper + 30 + 18 * number
        body.append(_curve(number, styles[name], [(left + x, line) for x in (10, 27, 44)]))
        body.append(text(left + 52, line + 4, name))
    path.write_text(svg(columns * width, top + rows * height, body), "utf-8")


def _round_values(panels: Iterable[Panel]) -> list[float]:
    """Return ticks such as 20, 50, 100 around all values, or powers of ten if these are many."""
    values = [y for panel in panels for curve in panel.curves.values() for _, y in curve] or [1.0]
    decades = range(floor(log10(min(values))), ceil(log10(max(values))) + 2)
    for factors in ((1, 2, 5), (1,)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        first = max(i for i, tick in enumerate(ticks) if tick <= min(values))
        last = min(i for i, tick in enumerate(ticks) if tick > max(values))
        if last - first < 10:
            break
    return ticks[first : last + 1]


def _frame(
    title: str, x: LogAxis, y: LogAxis, lengths: Sequence[float], values: Sequence[float]
) -> list[str]:
    """Return the title, and the ticks with their lines."""
    lines = [f"M{x.place(n):.1f} {y.start:.1f}V{y.end:.1f}" for n in lengths]
    lines += [f"M{x.start:.1f} {y.place(n):.1f}H{x.end:.1f}" for n in values]
    return [
        f'<path class="grid" d="{"".join(lines)}"/>',
        text((x.start + x.end) / 2, y.end - 8, title, "m"),
        *(text(x.place(n), y.start + 16, f"{n:,.0f}", "m") for n in lengths),
        *(text(x.start - 6, y.place(n) + 4, f"{n:,g}", "e") for n in values),
        text((x.start + x.end) / 2, y.start + 32, "tokens", "m"),
    ]


def _marker(number: int, style: Style) -> str:
    return (
        f'<marker id="m{number}" viewBox="-5 -5 10 10" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse"><path style="fill: var(--{style.color})" '
        f'd="{MARKERS[style.marker]}"/></marker>'
    )


def _curve(number: int, style: Style, points: Iterable[tuple[float, float]]) -> str:
    dash = DASHES[style.dash] and f"; stroke-dasharray: {DASHES[style.dash]}"
    return (
        f'<polyline class="curve" style="stroke: var(--{style.color}); '
        f'stroke-width: {style.width:g}{dash}; marker: url(#m{number})" '
        f'points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
    )
