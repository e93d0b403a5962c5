"""The bundle that answers requests, and its loaded model."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from aftexport.bundle.bundle import Bundle
from aftserve.model.load import LoadedModel


@dataclass(eq=False)
class ActiveBundle:
    """A bundle and its loaded model.

    A request stays with the bundle that it began with. Documents of two bundles never share a run.

    Attributes:
        bundle: a checked bundle.
        model: the loaded model; another one after the server falls back.
        since: time when it was loaded.
    """

    bundle: Bundle
    model: LoadedModel
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
