"""Series of 16 sensors of four machines, of which one vibrates slowly.

Each sensor has bursts of vibration between noise. All bursts are fast, except those of the
vibration sensor of the faulty machine. Slow and fast bursts have the same number, length, mean and
power, so that only the order of the steps tells the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aftexport.bundle.features import Features

MACHINES = ("fan", "gearbox", "motor", "pump")
SENSORS = ("temperature", "pressure", "current", "vibration")
NAMES = tuple(f"{machine} {sensor}" for machine in MACHINES for sensor in SENSORS)
STEPS = range(256, 16_385)
"""The lengths of series, whose logarithms are uniform."""

BURST = 32
"""Steps of a burst."""
EVERY = 64
"""Steps for each burst, on average."""
_SLOW, _FAST = 16, 4
_POWER = 8.0
"""Mean square of a burst, in units of the noise."""

Steps = NDArray[np.float32]
"""The values of a series, ``[T, 16]``."""


@dataclass(frozen=True)
class Series:
    """A series and its truth.

    Attributes:
        ids: the values, measured or normalized.
        label: the faulty machine.
    """

    ids: Steps
    label: str

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Tensor:
        """Return the index of the machine; see ``Target``."""
        return torch.tensor(MACHINES.index(self.label))


def make_series(count: int, seed: int, units: int = 0) -> list[Series]:
    """Return series of mixed lengths, as many of each machine as possible.

    Args:
        count: number of series.
        seed: seed of the lengths, the noise and the bursts.
        units: seed of the offset and the unit of each sensor, which all series share.
    """
    sensors = np.random.default_rng((1, units))
    offsets = sensors.uniform(-50, 50, len(NAMES)).astype(np.float32)
    scales = np.exp(sensors.normal(0, 1.5, len(NAMES))).astype(np.float32)
    generator = np.random.default_rng((0, seed))
    logarithms = generator.uniform(np.log(STEPS.start), np.log(STEPS.stop), count)
    labels = [MACHINES[index % len(MACHINES)] for index in range(count)]
    return [
        Series(_values(int(steps), label, generator) * scales + offsets, label)
        for steps, label in zip(np.exp(logarithms), labels, strict=True)
    ]


def features_of(series: Sequence[Series]) -> Features:
    """Return the names of the sensors, and the normalization by the mean and the deviation."""
    values = np.concatenate([one.ids for one in series]).astype(np.float64)
    mean, scale = values.mean(0).tolist(), values.std(0).tolist()
    return Features(names=NAMES, mean=tuple(mean), scale=tuple(scale))


def normalized(series: Sequence[Series], features: Features) -> list[Series]:
    """Return the series as the server normalizes them."""
    return [Series(features.normalized(one.ids), one.label) for one in series]


def summaries(series: Sequence[Series]) -> NDArray[np.float64]:
    """Return the mean and the deviation of each sensor, ``[len(series), 32]``."""
    return np.stack([np.concatenate([one.ids.mean(0), one.ids.std(0)]) for one in series])


def find_fault(values: Steps) -> str:
    """Return the machine by a matched filter, which knows the form of a slow burst."""
    pattern = _burst(_SLOW)

    def strongest(machine: str) -> float:
        one = values[:, NAMES.index(f"{machine} vibration")]
        scaled = (one - one.mean()) / one.std()
        return float(np.abs(np.correlate(scaled, pattern, "valid")).max())

    return max(MACHINES, key=strongest)


def _values(steps: int, label: str, generator: np.random.Generator) -> Steps:
    """Return noise with bursts, in units of the noise."""
    values = generator.standard_normal((steps, len(NAMES)), np.float32)
    for column, name in enumerate(NAMES):
        pattern = _burst(_SLOW if name == f"{label} vibration" else _FAST)
        places = generator.permutation(steps // BURST)[: steps // EVERY] * BURST
        signs = generator.choice(np.array([-1, 1], np.float32), len(places))
        values[places[:, None] + np.arange(BURST), column] += signs[:, None] * pattern
    return values


def _burst(period: int) -> Steps:
    wave = np.sin(2 * np.pi * (np.arange(BURST) + 0.5) / period)
    return np.asarray(wave * np.sqrt(_POWER / np.mean(wave**2)), np.float32)
