"""``aftserve batch`` against a loop that posts single documents to ``/infer``."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from commands import run_python
from servers import serving

from load.documents import BOUND


@dataclass(frozen=True)
class Answers:
    """The answers to all documents."""

    seconds: float
    answers: list[dict[str, Any]]  # label and scores of each document, in order

    def count_differences(self, other: "Answers") -> int:
        """Count the documents whose label differs, or whose scores differ over the bound."""
        return sum(
            a["label"] != b["label"]
            or any(abs(a["scores"][label] - b["scores"][label]) > BOUND for label in b["scores"])
            for a, b in zip(self.answers, other.answers, strict=True)
        )


def write(texts: Sequence[str], folder: Path) -> None:
    """Write each text to a file; the names keep the order."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for number, text in enumerate(texts):
        (folder / f"{number:06}.txt").write_text(text, "utf-8")


def by_loop(bundle: Path, folder: Path, log: Path, threads: int) -> Answers:
    """Send documents one by one to a server; its start is not measured."""
    with (
        serving(bundle, log, "--threads", str(threads), measured=True) as (address, _),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        started = time.monotonic()
        answers = []
        for path in sorted(folder.iterdir()):
            response = client.post("/infer", json={"text": path.read_text("utf-8")})
            answers.append(response.raise_for_status().json())
        return Answers(time.monotonic() - started, answers)


def by_batch(bundle: Path, folder: Path, out: Path, threads: int) -> Answers:
    """Run the command, and measure it with its start and that of Ray."""
    started = time.monotonic()
    words = ("batch", bundle.resolve(), folder.resolve(), "--output", out.resolve())
    outcome = run_python("-m", "aftserve", *words, "--threads", str(threads), cwd=folder.parent)
    seconds = time.monotonic() - started
    if outcome.code != 0:
        raise RuntimeError(outcome.err)
    return Answers(seconds, [json.loads(line) for line in out.read_text("utf-8").splitlines()])
