"""The layout of a plot of errors, which the page draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 640.0, 280.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 16.0, 44.0
_MIN_ERROR = 1e-10
"""Smaller errors are drawn here, because a logarithmic axis has no 0."""


@dataclass(frozen=True)
class Point:
    """The point of an error.

    Attributes:
        x, y: coordinates in the drawing.
        label: name and size of the error.
        outside: whether the error is outside its tolerance.
    """

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
class Plot:
    """A plot of errors in units of the drawing, with both axes logarithmic or x by rank.

    Attributes:
        width, height: size of the drawing.
        left, right, top, bottom: edges of the frame.
        points: the points in order of x.
        x_ticks, y_ticks: the ticks of the axes.
        bound: position of the tolerance; None if the points have different tolerances.
        bound_text: label of the tolerance.
    """

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    points: Sequence[Point]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    bound: float | None
    bound_text: str


def error_plot(
    errors: Sequence[tuple[float, float, str, float]], names: Sequence[str] | None = None
) -> Plot:
    """Return a plot of errors.

    Args:
        errors: at least one tuple of x (at least 1), the error, a label and the bound.
        names: names of the positions x = 1, 2, ... on the x axis; None for a logarithmic axis.
    """
    finite = [e for _, e, _, _ in errors if math.isfinite(e)]
    bounds = {bound for *_, bound in errors}
    logs = [_log(value) for value in (*finite, *bounds)]
    low, high = math.floor(min(logs)), math.ceil(max(logs) + 0.2)
    last = max(x for x, *_ in errors)

    def place_x(x: float) -> float:
        if names is not None:
            share = (x - 0.5) / len(names)
        else:
            share = math.log2(x) / max(math.log2(last), 1)
        return _LEFT + 8 + share * (_WIDTH - _RIGHT - _LEFT - 16)

    def place_y(error: float) -> float:
        share = (min(_log(error), high) - low) / (high - low) if math.isfinite(error) else 1.0
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    points = [
        Point(
            round(place_x(x), 1),
            round(place_y(error), 1),
            f"{label}: {error:.1e}",
            not error <= bound,
        )
        for x, error, label, bound in sorted(errors, key=lambda entry: entry[0])
    ]
    if names is not None:
        shown = max(1, math.ceil(len(names) / 16))
        x_ticks = [Tick(place_x(i + 1), str(i + 1)) for i in range(0, len(names), shown)]
    else:
        step = max(1, round(math.log2(max(last, 2)) / 8))
        x_ticks = [
            Tick(place_x(2**i), f"{2**i:,}") for i in range(0, int(math.log2(last)) + 1, step)
        ]
    stride = max(1, math.ceil((high - low) / 6))
    y_ticks = [Tick(place_y(10.0**i), f"1e{i}") for i in range(low, high + 1, stride)]
    bound = place_y(max(bounds)) if len(bounds) == 1 else None
    return Plot(
        _WIDTH,
        _HEIGHT,
        _LEFT,
        _WIDTH - _RIGHT,
        _TOP,
        _HEIGHT - _BOTTOM,
        points,
        x_ticks,
        y_ticks,
        bound,
        f"tolerance {max(bounds):.0e}",
    )


def _log(value: float) -> float:
    return math.log10(max(value, _MIN_ERROR))
