"""Train a model of 16 sensors that finds the faulty one of four machines, and export it.

The series are made, so the truth is known. Run it from the root of the repository with

    pip install '.[cpu,torch]'
    python examples/sensor_series.py

Each sensor has bursts of vibration between noise. All bursts are fast, except those of the
vibration sensor of the faulty machine. Slow and fast bursts have the same number, length, mean and
power, so only the order of the steps tells the machine. A token of the model is a step: a vector
of 16 features. The bundle normalizes by ``features.json``, so it takes series in the sensors' own
units. The example prints the share of held-out series that the bundle labels right.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

import aftexport
import aftserve
from aftexport.nn import AftLocal, ClassifierConfig, DocumentClassifier, task_loss

MACHINES = ("fan", "gearbox", "motor", "pump")
SENSORS = ("temperature", "pressure", "current", "vibration")
NAMES = tuple(f"{machine} {sensor}" for machine in MACHINES for sensor in SENSORS)
BURST, EVERY, SLOW, FAST = 32, 64, 16, 4
BATCH, PART = 64, 256

Steps = NDArray[np.float32]
"""The values of a series, ``[T, 16]``."""


def burst(period: int) -> Steps:
    """Return a burst of vibration whose mean square is 8 times that of the noise."""
    wave = np.sin(2 * np.pi * (np.arange(BURST) + 0.5) / period)
    return (wave * np.sqrt(8 / np.mean(wave**2))).astype(np.float32)


def make_series(count: int, generator: np.random.Generator) -> list[Steps]:
    """Return series of 256 to 2,048 steps; series i is of the machine i modulo 4."""
    sensors = np.random.default_rng(0)  # the sensors have the same units in all series
    offsets = sensors.uniform(-50, 50, len(NAMES)).astype(np.float32)
    scales = np.exp(sensors.normal(0, 1.5, len(NAMES))).astype(np.float32)
    found = []
    for index in range(count):
        steps = int(256 * 8 ** generator.uniform())
        values = generator.standard_normal((steps, len(NAMES)), np.float32)
        slow = NAMES.index(f"{MACHINES[index % 4]} vibration")
        for column in range(len(NAMES)):
            places = generator.permutation(steps // BURST)[: steps // EVERY] * BURST
            signs = generator.choice(np.array([-1, 1], np.float32), len(places))
            wave = burst(SLOW if column == slow else FAST)
            values[places[:, None] + np.arange(BURST), column] += signs[:, None] * wave
        found.append(values * scales + offsets)
    return found


def build() -> DocumentClassifier:
    """Return a model whose first attention begins with the nearest steps."""
    config = ClassifierConfig(
        mechanism="aft_local", num_features=len(NAMES), num_labels=len(MACHINES), dim=64, depth=2,
        ffn_dim=128, window=16, causal=True, pooling="attention",
    )  # fmt: skip
    model = DocumentClassifier(config)
    layers = [layer for layer in model.modules() if isinstance(layer, AftLocal)]
    with torch.no_grad():
        for depth, layer in enumerate(layers):
            distances = torch.tensor([abs(offset) for offset in layer.offsets])
            layer.relative_bias.copy_(12 - 0.3 * distances / 4**depth)
    return model


def train(model: DocumentClassifier, series: Sequence[Steps], steps: int) -> None:
    """Train in place on random parts of normalized series."""
    generator = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        chosen = generator.integers(len(series), size=BATCH)
        starts = [generator.integers(len(series[i]) - PART + 1) for i in chosen]
        parts = [series[i][start : start + PART] for i, start in zip(chosen, starts, strict=True)]
        logits = model(torch.from_numpy(np.stack(parts)), torch.full((BATCH,), PART))
        loss = task_loss(model.config.problem_type, logits, torch.from_numpy(chosen % 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def main() -> None:
    """Train, export and judge a model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps")
    parser.add_argument("--out", type=Path, default=Path("build/examples/series"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)  # threads of so small a model mostly wait for one another
    torch.manual_seed(0)
    generator = np.random.default_rng(1)
    training, held_out = make_series(160, generator), make_series(40, generator)
    values = np.concatenate(training).astype(np.float64)
    mean, scale = values.mean(0), values.std(0)
    model = build()
    normalized = [((one - mean) / scale).astype(np.float32) for one in training]
    train(model, normalized, arguments.steps)

    path, feature_file = arguments.out / "model.pt", arguments.out / "features.json"
    features = {"names": NAMES, "mean": mean.tolist(), "scale": scale.tolist()}
    feature_file.write_text(json.dumps(features))
    aftexport.save(path, model=model, labels=MACHINES)
    exported = aftexport.export(
        path, feature_file=feature_file, force=True, console=Console(quiet=True)
    )
    with aftserve.Predictor(exported.path) as predictor:
        answers = [answer.label for answer in predictor(held_out)]
    right = [label == MACHINES[index % 4] for index, label in enumerate(answers)]
    print(f"{np.mean(right):.1%} right of {len(right)} held-out series")


if __name__ == "__main__":
    main()
