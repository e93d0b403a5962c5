"""Bundles and API keys that are replaced under load, and the order in which clients see them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from load.every_head import Document, Expected


@dataclass
class Generations:
    """The generations of a file of the server, numbered from 0."""

    written: int = 0  # the newest that the server may have read
    seen: int = 0  # the newest that an answer has shown; later requests have at least this one

    def show(self, generation: int) -> None:
        """Note the generation of an answer."""
        self.seen = max(self.seen, generation)

    def since(self, seen: int) -> range:
        """Return the generations that may have answered a request sent when ``seen`` was seen."""
        return range(seen, self.written + 1)


@dataclass
class ServedModel:
    """A model whose bundle is replaced, and the answers of each bundle."""

    name: str
    # Digest and expected answers of the bundles, which take turns.
    variants: Sequence[tuple[str, Sequence[Expected]]]
    prefix: str = ""  # path of the model, without a slash at its end
    is_default: bool = True  # whether it answers paths without a prefix
    generations: Generations = field(default_factory=Generations)
    # The model is loaded in even generations.
    presence: Generations = field(default_factory=Generations)

    def digest(self, generation: int) -> str:
        """Return the digest of the bundle of a generation."""
        return self.variants[generation % len(self.variants)][0]

    def expected(self, generation: int, document: Document) -> Expected:
        """Return the answer of the bundle of a generation for a document."""
        return self.variants[generation % len(self.variants)][1][document.number]


@dataclass
class KeyRing:
    """The API keys of the clients."""

    admin: str  # stays, with the rights to reload
    limited: str  # stays, with a rate
    # Of each generation; only that of the file is valid, and the first never was.
    rotated: list[str]
    generations: Generations = field(default_factory=lambda: Generations(written=1, seen=1))

    def draw(self, generator: np.random.Generator) -> int | None:
        """Draw the generation of a key: current, next or replaced; None for the limited key."""
        seen, written = self.generations.seen, self.generations.written
        share = generator.random()
        if share < 0.1:
            return None
        if share < 0.3:
            return seen - 1
        return written if share < 0.5 else seen

    def key(self, generation: int | None) -> str:
        """Return the key that was drawn."""
        return self.limited if generation is None else self.rotated[generation]
