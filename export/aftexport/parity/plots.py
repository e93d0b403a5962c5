"""The layout of a plot of errors; apart, as a GPU machine lacks the packages of the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 640.0, 280.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 16.0, 44.0
_MIN_ERROR = 1e-10
"""Smaller errors are drawn here, because a logarithmic axis has no 0."""


@dataclass(frozen=True)
class Point:
    """The point of an error."""

    x: float
    y: float
    label: str
    outside: bool


@dataclass(frozen=True)
class Tick:
    """A position on an axis and its label."""

    at: float
    text: str


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis: the values low and high are at the coordinates start and end."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return the coordinate of a positive value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class Plot:
    """A plot of errors in units of the drawing, with both axes logarithmic or x by rank."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    points: Sequence[Point]
    x_ticks: Sequence[Tick]  # ticks of the axes
    y_ticks: Sequence[Tick]
    bound: float | None  # position of the tolerance; None if the points have different tolerances
    bound_text: str


@dataclass(frozen=True)
class _Scales:
    """The mapping from positions and errors to the drawing."""

    last: float
    low: int  # decimal exponents of the smallest and the largest error of the y axis
    high: int
    # names of the positions x = 1, 2, ... on the x axis; None for a logarithmic axis
    names: Sequence[str] | None

    def place_x(self, x: float) -> float:
        start, end = _LEFT + 8, _WIDTH - _RIGHT - 8
        if self.names is not None:
            return start + (x - 0.5) / len(self.names) * (end - start)
        return LogAxis(1, max(self.last, 2), start, end).place(x)

    def place_y(self, error: float) -> float:
        low, high = 10.0**self.low, 10.0**self.high
        shown = min(max(error, _MIN_ERROR), high) if math.isfinite(error) else high
        return LogAxis(low, high, _HEIGHT - _BOTTOM, _TOP).place(shown)

    def x_ticks(self) -> list[Tick]:
        if self.names is not None:
            step = max(1, math.ceil(len(self.names) / 16))
            ranks = range(1, len(self.names) + 1, step)
            return [Tick(self.place_x(rank), str(rank)) for rank in ranks]
        step = max(1, round(math.log2(max(self.last, 2)) / 8))
        exponents = range(0, int(math.log2(self.last)) + 1, step)
        return [Tick(self.place_x(2**i), f"{2**i:,}") for i in exponents]

    def y_ticks(self) -> list[Tick]:
        step = max(1, math.ceil((self.high - self.low) / 6))
        exponents = range(self.low, self.high + 1, step)
        return [Tick(self.place_y(10.0**i), f"1e{i}") for i in exponents]


def error_plot(
    errors: Sequence[tuple[float, float, str, float]], names: Sequence[str] | None = None
) -> Plot:
    """Return a plot of tuples of x (at least 1), the error, a label and the bound.

    With ``names`` of the positions x = 1, 2, ... the x axis is not logarithmic.
    """
    finite = [e for _, e, _, _ in errors if math.isfinite(e)]
    bounds = {bound for *_, bound in errors}
    logs = [_log(value) for value in (*finite, *bounds)]
    low, high = math.floor(min(logs)), math.ceil(max(logs) + 0.2)
    scales = _Scales(max(x for x, *_ in errors), low, high, names)
    points = [
        Point(
            round(scales.place_x(x), 1),
            round(scales.place_y(error), 1),
            f"{label}: {error:.1e}",
            not error <= bound,
        )
        for x, error, label, bound in sorted(errors, key=lambda entry: entry[0])
    ]
    return Plot(
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        bottom=_HEIGHT - _BOTTOM,
        points=points,
        x_ticks=scales.x_ticks(),
        y_ticks=scales.y_ticks(),
        bound=scales.place_y(max(bounds)) if len(bounds) == 1 else None,
        bound_text=f"tolerance {max(bounds):.0e}",
    )


def _log(value: float) -> float:
    return math.log10(max(value, _MIN_ERROR))
