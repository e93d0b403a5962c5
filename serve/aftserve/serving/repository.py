"""The models of the server, by their names."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aftserve.errors import NotFoundError, UnavailableError
from aftserve.model.active import ActiveBundle
from aftserve.model.reload import Reloader
from aftserve.serving.resources import SharedResources
from aftserve.serving.service import Service
from aftserve.settings import Settings


@dataclass(eq=False)
class _Entry:
    """A model that the server knows.

    Attributes:
        reloader: the loads of its bundle.
        settings: settings of the model.
        service: the model's service; None while it is not loaded.
    """

    reloader: Reloader
    settings: Settings
    service: Service | None = None


class ModelRepository:
    """The models of the server, which share its resources.

    Args:
        shared: the parts that all models share.
        default_name: name of the model that answers paths without a name; None for no such model.
    """

    def __init__(self, shared: SharedResources, default_name: str | None) -> None:
        self.shared = shared
        self._default_name = default_name
        self._entries: dict[str, _Entry] = {}
        shared.metrics.ready.set_function(lambda: self.ready)

    @property
    def settings(self) -> Settings:
        """The settings of the server."""
        return self.shared.settings

    @property
    def default(self) -> Service | None:
        """The model that answers paths without a name; None if there is no such model."""
        entry = self._entries.get(self._default_name or "")
        return entry.service if entry is not None else None

    def loaded(self) -> Sequence[Service]:
        """Return the loaded models, in the order of their names."""
        found = (self._entries[name].service for name in sorted(self._entries))
        return [service for service in found if service is not None]

    def named(self, name: str) -> Service:
        """Return a loaded model.

        Raises:
            NotFoundError: if no loaded model has this name.
        """
        return named_in(self.loaded(), name)

    @property
    def ready(self) -> bool:
        """Whether the server takes requests: its process does, and at least one model."""
        return any(service.health.ready for service in self.loaded())

    @property
    def answers(self) -> bool:
        """Whether a model answers requests, even while the server is not ready."""
        return any(service.health.answers for service in self.loaded())

    @property
    def status(self) -> str:
        """The phase of the process, with the models that are not ready."""
        loaded, phase = self.loaded(), self.shared.health.phase
        broken = {one.name: one.health.breach for one in loaded if one.health.breach is not None}
        if phase != "ready" or (loaded and not broken):
            return phase
        if len(loaded) == 1:
            return loaded[0].health.status
        reasons = "; ".join(f"{name}: {reason}" for name, reason in broken.items())
        if len(broken) < len(loaded):
            return f"ready, except {reasons}"
        return f"not ready: {reasons or 'no model is loaded'}"

    def check_open(self) -> None:
        """Check that the server takes requests, before it reads one.

        Raises:
            UnavailableError: if the process or every model answers no requests.
            BusyError: if the queue is too long.
        """
        if not self.answers:
            raise UnavailableError(f"The server is {self.status}.", "Ask another one.", 1)
        self.shared.admission.check_queue()

    def add(self, name: str, path: Path, settings: Settings, active: ActiveBundle) -> None:
        """Add a model whose bundle is loaded.

        Args:
            name: name of the model.
            path: path of the bundle, for reloads.
            settings: settings of the model.
            active: the bundle and its loaded model.
        """
        shared = self.shared
        activate = partial(self._activate, name)
        reloader = Reloader(path, settings, shared.loader, activate, shared.metrics)
        service = Service(name, active, settings, shared, reloader)
        self._entries[name] = _Entry(reloader, settings, service)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer requests within the block."""
        async with self.shared.running():
            for service in self.loaded():
                service.check_breach()
            yield
            self.stop_loads()
            for service in self.loaded():
                await service.close()

    def start_reload(self) -> None:
        """Begin to reload every loaded model."""
        for entry in self._entries.values():
            entry.reloader.start()

    def stop_loads(self) -> None:
        """Cancel all loads and reloads; a thread that loads a bundle cannot be stopped."""
        for entry in self._entries.values():
            entry.reloader.close()

    async def _activate(self, name: str, active: ActiveBundle) -> None:
        """Answer new requests for a model with a bundle."""
        service = self._entries[name].service
        assert service is not None
        await service.activate(active)


def named_in(models: Sequence[Service], name: str) -> Service:
    """Return the model with a name.

    Raises:
        NotFoundError: if none of the models has it.
    """
    for model in models:
        if model.name == name:
            return model
    names = ", ".join(repr(model.name) for model in models)
    expected = f"one of the models {names}" if len(models) > 1 else f"the model {names}"
    if not models:
        raise NotFoundError(
            f"Expected the name of a loaded model, got {name[:100]!r}; no model is loaded.",
            "Load one first.",
        )
    raise NotFoundError(f"Expected {expected}, got {name[:100]!r}.", "Name an expected model.")
