"""What is served at a time: a bundle, and the model that was loaded of it."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from aftexport.bundle import Bundle
from aftserve.model.load import LoadedModel


@dataclass(eq=False)
class Served:
    """Every request stays with the one that it began with, and documents of two never share a run.

    Attributes:
        bundle: a checked bundle.
        model: of it; another where the server falls back.
        since: when it was loaded.
    """

    bundle: Bundle
    model: LoadedModel
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
