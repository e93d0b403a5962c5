"""Bundles that replace each other under a server, and their answers."""

import shutil
import time
from pathlib import Path

import httpx
import numpy as np
from clients import http
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftserve.server import load
from aftserve.serving.repository import ModelRepository
from aftserve.settings import Settings

LENGTHS = (1, 16, 300, 20, 2000, 16, 40, 700)


def deploy(bundle: Path, place: Path) -> Path:
    """Move a copy of a bundle into place, as a deployment does."""
    copy = Path(shutil.copytree(bundle, place.with_suffix(".new")))
    if place.exists():
        place.rename(place.with_suffix(f".{time.monotonic_ns()}"))
    return copy.rename(place)


def damage(bundle: Path) -> None:
    """Overwrite some bytes of the bundle's model."""
    with (bundle / "model.onnx").open("r+b") as file:
        file.seek(100)
        file.write(b"\0\0\0\0")


def digest(bundle: Path) -> str:
    return Bundle.open(bundle).digest


def documents() -> list[list[int]]:
    """Return one document for each of ``LENGTHS``."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 250, length).tolist() for length in LENGTHS]


def load_models(place: Path, *options: str) -> ModelRepository:
    """Load bundles in this process."""
    return load(Settings.read([str(place), "--threads", "1", *options]), Console(quiet=True))


def expected_scores(bundle: Path) -> dict[tuple[int, ...], list[float]]:
    """Return the scores of each document, each from a run of its own."""
    (service,) = load_models(bundle).loaded()
    classifier = service.model.classifier
    return {
        tuple(ids): list(classifier.classify([np.array(ids)])[0].heads["logits"].scores.values())
        for ids in documents()
    }


def post(address: str, *input_ids: list[int]) -> httpx.Response:
    return http.post(f"{address}/infer", json={"input_ids": list(input_ids)}, timeout=60)


def last_reload(address: str) -> dict[str, object] | None:
    return http.get(f"{address}/info").json()["last_reload"]  # type: ignore[no-any-return]


def served_digest(address: str) -> str:
    return str(http.get(f"{address}/info").json()["bundle"])
