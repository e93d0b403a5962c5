"""Bundles and API keys that are replaced under load, and the order in which clients see them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from load.every_head import Document, Expected


@dataclass
class Generations:
    """The generations of a file of the server, numbered from 0.

    Attributes:
        written: the newest generation that the server may have read.
        seen: the newest generation that an answer has shown. Requests sent later have this one, or
            a newer one.
    """

    written: int = 0
    seen: int = 0

    def show(self, generation: int) -> None:
        """Note the generation of an answer."""
        self.seen = max(self.seen, generation)

    def since(self, seen: int) -> range:
        """Return the generations that may have answered a request sent when ``seen`` was seen."""
        return range(seen, self.written + 1)


@dataclass
class ServedModel:
    """A model whose bundle is replaced, and the answers of each bundle.

    Attributes:
        name: its name.
        variants: digest and expected answers of the bundles, which take turns.
        prefix: path of the model, without a slash at its end.
        is_default: whether the model answers paths without a prefix.
        generations: the order in which clients see the bundles.
        presence: the order in which clients see the model come and go; it is loaded in even
            generations.
    """

    name: str
    variants: Sequence[tuple[str, Sequence[Expected]]]
    prefix: str = ""
    is_default: bool = True
    generations: Generations = field(default_factory=Generations)
    presence: Generations = field(default_factory=Generations)

    def digest(self, generation: int) -> str:
        """Return the digest of the bundle of a generation."""
        return self.variants[generation % len(self.variants)][0]

    def expected(self, generation: int, document: Document) -> Expected:
        """Return the answer of the bundle of a generation for a document."""
        return self.variants[generation % len(self.variants)][1][document.number]


@dataclass
class KeyRing:
    """The API keys of the clients.

    Attributes:
        admin: a key that stays, with the rights to reload.
        limited: a key that stays, with a rate.
        rotated: the key of each generation; only that of the file is valid. The first one has
            never been valid.
        generations: the order in which clients see the keys.
    """

    admin: str
    limited: str
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
