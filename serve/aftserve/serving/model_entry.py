"""A model that the server knows, loaded or not, and its state."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aftserve.model.reload import Reloader
from aftserve.serving.service import Service
from aftserve.settings import Settings

State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
"""The states of a model in the protocol's extension for repositories."""


@dataclass(frozen=True)
class ModelState:
    """The state of a model that the server knows.

    Attributes:
        name: name of the model.
        state: READY if it takes requests.
        reason: reason why it does not; empty otherwise.
    """

    name: str
    state: State
    reason: str = ""


@dataclass(eq=False)
class ModelEntry:
    """A model that the server knows.

    Attributes:
        name: name of the model.
        settings: settings of the model.
        reloader: the loads of its bundle.
        service: its service; None while it is not loaded.
        is_unloaded: whether an administrator unloaded it, so that only an administrator loads it.
        endings: tasks that end its services, which answer their last requests.
        problem: reason why no bundle can be chosen for it; None if one can.
    """

    name: str
    settings: Settings
    reloader: Reloader
    service: Service | None = None
    is_unloaded: bool = False
    endings: "set[asyncio.Task[None]]" = field(default_factory=set)
    problem: str | None = None

    @property
    def path(self) -> Path:
        """Path of its bundle."""
        return self.reloader.path

    @property
    def state(self) -> ModelState:
        """The state of the model."""
        if self.service is not None:
            health = self.service.health
            if health.ready:
                return ModelState(self.name, "READY")
            return ModelState(self.name, "UNAVAILABLE", health.status)
        if self.endings:
            return ModelState(self.name, "UNLOADING", "accepted requests are answered")
        if self.reloader.running:
            return ModelState(self.name, "LOADING")
        return ModelState(self.name, "UNAVAILABLE", self._reason)

    @property
    def _reason(self) -> str:
        """The reason why the model is not loaded."""
        last = self.reloader.last
        failed = last.problem if last is not None else None
        return "unloaded" if self.is_unloaded else self.problem or failed or "not loaded"
