"""The options of a demo."""

from dataclasses import dataclass, field
from pathlib import Path

from aftexport.bundle.bundle import is_bundle
from aftexport.errors import UsageError
from aftexport.nn.config import MECHANISM_LAYERS

BUNDLE = "bundle"
"""Name of the folder of the bundle in that of the demo."""


@dataclass(frozen=True)
class Size:
    """The amount of work.

    Attributes:
        classes: number of packages whose source files are used.
        per_class: maximum number of files per package.
        steps: number of optimizer steps.
        max_seconds: maximum wall time of the training.
    """

    classes: int = 8
    per_class: int = 250
    steps: int = 250
    max_seconds: float = 110.0


@dataclass(frozen=True)
class DemoOptions:
    """The options of ``aftexport demo``.

    Attributes:
        mechanism: one of ``MECHANISM_LAYERS``.
        data: the user's documents, ``.csv`` or ``.jsonl``; None for source files
            of the packages installed here.
        out: the folder, which is created if it does not exist.
        seed: seed of the choice of documents, the split, the initial weights and the training.
        size: the amount of work.
    """

    mechanism: str
    data: Path | None
    out: Path
    seed: int
    size: Size = field(default_factory=Size)

    def check(self) -> None:
        """Raise UsageError if an option cannot be used."""
        if self.mechanism not in MECHANISM_LAYERS:
            raise UsageError(
                f"--mechanism must be a known mechanism, got {self.mechanism!r}.",
                f"Choose one of {', '.join(MECHANISM_LAYERS)}.",
            )
        if not 0 <= self.seed < 2**32:
            raise UsageError(
                f"--seed must be from 0 to 4294967295, got {self.seed}.",
                "Give a number in this range.",
            )
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(
                f"--out must be a folder, got the file {self.out}.", "Choose a folder."
            )
        bundle = self.out / BUNDLE
        is_ours = not bundle.exists() or is_bundle(bundle)
        if not is_ours and (bundle.is_file() or any(bundle.iterdir())):
            raise UsageError(f"{bundle} exists and is not a bundle.", "Choose another --out.")
