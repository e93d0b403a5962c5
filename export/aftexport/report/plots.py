"""Where the points of a plot of errors go; the page draws them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 640.0, 280.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 16.0, 44.0
_LEAST = 1e-10
"""Errors below it are drawn there: a logarithm has no place for 0."""


@dataclass(frozen=True)
class Point:
    """One error.

    Attributes:
        x, y: in the drawing.
        label: what it is the error of, and how large.
        outside: of its tolerance.
    """

    x: float
    y: float
    label: str
    outside: bool


@dataclass(frozen=True)
class Tick:
    """A place on an axis, and its name."""

    at: float
    text: str


@dataclass(frozen=True)
class Plot:
    """A plot of errors, in units of the drawing, both axes logarithmic or x by rank.

    Attributes:
        width, height: of the drawing.
        left, right, top, bottom: of the frame in it.
        points: in order of x.
        x_ticks, y_ticks: of the axes.
        bound: where the tolerance is; None where the points have different ones.
        bound_text: its name.
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
    """Places errors.

    Args:
        errors: x, 1 or more; the error; a label; the bound. At least one.
        names: of the places on the x axis, where x counts them from 1; None for a
            logarithmic axis.
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
        for x, error, label, bound in sorted(errors, key=lambda found: found[0])
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
    return math.log10(max(value, _LEAST))
