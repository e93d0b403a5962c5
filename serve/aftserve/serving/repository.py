"""The models of the server, by their names: load, reload and unload."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio.to_thread

from aftexport.system.process import collect_frozen
from aftserve.errors import NotFoundError, UnavailableError
from aftserve.http.clients import current_client
from aftserve.model.load import ActiveBundle
from aftserve.model.reload import Reloader, ReloadError
from aftserve.schemas import Reload
from aftserve.serving.bundle_paths import BundlePaths, FoundBundles
from aftserve.serving.service import Service, SharedResources
from aftserve.settings import Settings

logger = logging.getLogger(__name__)

State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
"""The states of a model in the protocol's extension for repositories."""
_RENAME = "Rename the folder of the bundle."
_CHECK = "Check the folder and its permissions, and load the model again."


@dataclass(frozen=True)
class ModelState:
    """The state of a model that the server knows."""

    name: str
    state: State
    reason: str = ""


@dataclass(eq=False)
class ModelEntry:
    """A model that the server knows."""

    name: str
    settings: Settings
    reloader: Reloader
    service: Service | None = None  # None while it is not loaded
    is_unloaded: bool = False  # by an administrator, so that only an administrator loads it
    # Of its services, which answer their last requests.
    endings: "set[asyncio.Task[None]]" = field(default_factory=set)
    problem: str | None = None  # reason why no bundle can be chosen for it

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


class ModelRepository:
    """The models of the server, which share its resources.

    Their names come from the bundles and the folders of the settings, never from a path in a
    request. Loads and reloads take turns, in a thread while the models answer.
    """

    def __init__(self, paths: BundlePaths, shared: SharedResources) -> None:
        self.shared = shared
        self._paths = paths
        self._entries: dict[str, ModelEntry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        shared.metrics.server_ready.set_function(lambda: self.ready)

    @property
    def settings(self) -> Settings:
        """The settings of the server."""
        return self.shared.settings

    @property
    def default(self) -> Service | None:
        """The model that answers paths without a name; None without a default."""
        entry = self._entries.get(self._paths.default_name or "")
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
        """Whether requests are answered even while the server is not ready.

        A request for a model that is not loaded gets 404 and does not change the server's health.
        """
        loaded = self.loaded()
        return self.shared.health.answers and (
            not loaded or any(service.health.answers for service in loaded)
        )

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
        self.shared.admission.check_queue(current_client.get())

    def add(self, name: str, path: Path, active: ActiveBundle) -> None:
        """Add a model whose bundle is loaded."""
        self._begin(self._know(name, path), active)

    async def index(self) -> Sequence[ModelState]:
        """Return the states of all models that are loaded or can be, by their names in order."""
        found = await anyio.to_thread.run_sync(self._paths.find)
        self._note(found)
        states = {
            name: ModelState(name, "UNAVAILABLE", found.clash(name) or "not loaded")
            for name in found.paths
        }
        states |= {name: entry.state for name, entry in self._entries.items()}
        return [states[name] for name in sorted(states)]

    async def load(self, name: str) -> Reload:
        """Load a model, or reload it.

        Raises:
            NotFoundError: if no bundle has this name.
            ReloadError: if its bundle cannot be read or used.
            UnavailableError: if the server stops meanwhile.
        """
        found = await self._find()
        if name in found.paths:
            entry = self._refresh(name, found)
        elif obstacle := self._paths.obstacle(name, found):
            raise ReloadError(f"The model {name!r} has no bundle: {obstacle}.", _CHECK)
        else:
            self._check_known(name, {*found.paths, *(one.name for one in self.loaded())})
            entry = self._entries[name]  # a loaded model, which keeps its bundle
        if entry.problem is not None and entry.service is None:
            raise ReloadError(f"The model {name!r} has no bundle: {entry.problem}.", _RENAME)
        entry.is_unloaded = False
        return await entry.reloader.run()

    async def unload(self, name: str) -> None:
        """Unload a model: refuse new requests at once, and return when accepted ones are answered.

        Raises:
            NotFoundError: if the server knows no model of this name.
            UnavailableError: if the server stops meanwhile.
        """
        self._check_known(name, self._entries)
        entry = self._entries[name]
        entry.is_unloaded = True
        self._start_end(entry)
        # Tasks of their own, because a client that leaves would cancel them.
        ended, _ = await asyncio.wait({*entry.endings})
        if any(task.cancelled() for task in ended):
            raise UnavailableError("The server is stopping.", "Ask another one.")

    async def rescan(self) -> None:
        """Reload all models, load new bundles of the folders, and unload those that are gone.

        A failure is logged and part of ``index``, and the other models go on. A model that an
        administrator unloaded stays so.
        """
        found = await self._find()
        for name, entry in [*self._entries.items()]:
            if name not in found.paths and found.is_gone(entry.path):
                self._start_end(self._entries.pop(name))
        for name in found.paths:
            self._refresh(name, found)
        entries = self._entries.values()
        wanted = [
            one for one in entries if not one.is_unloaded and (one.service or not one.problem)
        ]
        if reloads := [entry.reloader.start() for entry in wanted]:
            await asyncio.wait(reloads)

    def start_rescan(self) -> None:
        """Begin a rescan."""
        self._run(self.rescan())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer requests within the block."""
        async with self.shared.running():
            self._check_breaches()
            yield
            self.stop_loads()
            for service in self.loaded():
                await service.close()

    def stop_loads(self) -> None:
        """Cancel all loads and reloads; a thread that loads a bundle cannot be stopped."""
        self._closed = True
        for entry in self._entries.values():
            entry.reloader.close()
        for task in self._tasks:
            task.cancel()

    def _check_breaches(self) -> None:
        # Not in ``running``, whose frame would hold the last service until the end.
        for service in self.loaded():
            service.check_breach()

    async def _find(self) -> FoundBundles:
        """Look for the bundles, and log the problems."""
        found = await anyio.to_thread.run_sync(self._paths.find)
        for problem in found.problems:
            logger.error("%s", problem)
        self._note(found)
        return found

    def _note(self, found: FoundBundles) -> None:
        """Note for which models no bundle can be chosen."""
        for name, entry in self._entries.items():
            entry.problem = found.clash(name)

    def _refresh(self, name: str, found: FoundBundles) -> ModelEntry:
        """Know a model by the paths that were found for it; its bundle may have moved."""
        paths = found.paths[name]
        entry = self._entries.get(name) or self._know(name, paths[0])
        entry.problem = found.clash(name)
        if entry.path not in paths and entry.problem is None:
            entry.reloader.path = paths[0]
        return entry

    def _start_end(self, entry: ModelEntry) -> None:
        """Begin to take a model out of service; ``entry.endings`` has the task."""
        task = self._run(self._end(entry))
        entry.endings.add(task)
        task.add_done_callback(entry.endings.discard)

    async def _end(self, entry: ModelEntry) -> None:
        """Take a model out of service; free its memory once accepted requests are answered."""
        service, entry.service = entry.service, None
        try:
            # A load that goes on takes memory, and counts its end in the metrics.
            await entry.reloader.wait()
            if service is not None:
                await service.retire()
        finally:
            if service is not None:
                await service.close()
            is_loaded = self._entries.get(entry.name, entry).service is not None  # meanwhile
            if not is_loaded and entry.endings <= {asyncio.current_task()}:
                self.shared.metrics.forget(entry.name)
        if service is not None:
            del service
            collect_frozen()  # a service and its parts refer to each other, and hold memory
            logger.info("unloaded the model %s", entry.name)

    def _run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run work in a task that ends with the server."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._settle)
        if self._closed:
            task.cancel()
        return task

    def _settle(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a change of the models has failed", exc_info=error)

    def _know(self, name: str, path: Path) -> ModelEntry:
        """Begin to know a model, which is not loaded yet."""

        async def activate(active: ActiveBundle) -> None:
            if entry.is_unloaded or self._entries.get(name) is not entry:
                raise ReloadError("The model was unloaded meanwhile.", "Load it again.")
            if entry.service is None:
                self._begin(entry, active)
            else:
                await entry.service.activate(active)

        shared, settings = self.shared, self.settings.of_model(name)
        metrics = partial(shared.metrics.of, name)
        reloader = Reloader(path, settings, shared.loader, activate, metrics)
        if self._closed:
            reloader.close()
        self._entries[name] = entry = ModelEntry(name, settings, reloader)
        return entry

    def _begin(self, entry: ModelEntry, active: ActiveBundle) -> None:
        """Begin to answer requests for a model."""
        entry.service = Service(entry.name, active, entry.settings, self.shared, entry.reloader)

    def _check_known(self, name: str, known: Collection[str]) -> None:
        if name not in known:
            names = " or ".join(map(repr, sorted(known))) or "none"
            raise NotFoundError(
                f"Expected the name of a bundle, {names}, got {name[:100]!r}.",
                "Put the bundle into a folder that the server serves.",
            )


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
