"""Reload of the bundle: the current one answers meanwhile, and stays if the new one fails."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio.to_thread
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.errors import AftexportError, ParityError
from aftserve.errors import RefusedError, UnavailableError
from aftserve.model.load import ActiveBundle, check_unchanged, load_model
from aftserve.observability.metrics import ModelMetrics
from aftserve.schemas import Reload
from aftserve.settings import Settings

logger = logging.getLogger("aftserve.reloading")

T = TypeVar("T")


class ReloadError(RefusedError):
    """The bundle cannot be used; an active one stays."""

    status = 409


class BundleLoader:
    """The loads of all bundles, which take turns so that one of them at a time needs memory."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()  # of the load that goes on, until its bundle is in use
        self.loading = False  # whether a thread loads a bundle

    async def load(self, path: Path, settings: Settings) -> ActiveBundle:
        """Load the bundle at a path while others answer; the caller holds ``turn``.

        Raises:
            AftexportError: if the bundle cannot be used.
        """
        return await self.run(partial(_load, path, settings))

    async def run(self, load: Callable[[], T]) -> T:
        """Run a function that loads a model, in a thread; the caller holds ``turn``."""

        def work() -> T:
            try:
                return load()
            finally:
                self.loading = False

        self.loading = True
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


class Reloader:
    """The loads and reloads of one bundle, one after the other.

    All requests during a reload share the next one, because the files may have changed since the
    current reload read them.
    """

    def __init__(
        self,
        path: Path,  # of the bundle at the next reload
        settings: Settings,
        loader: BundleLoader,
        activate: Callable[[ActiveBundle], Awaitable[None]],  # puts the new bundle to use
        metrics: Callable[[], ModelMetrics],  # the metrics of the model begin again after an unload
    ) -> None:
        self.last: Reload | None = None
        self.path = path
        self._settings = settings
        self._loader = loader
        self._activate = activate
        self._metrics = metrics
        self._tasks: set[asyncio.Task[Reload]] = set()
        self._next: asyncio.Task[Reload] | None = None
        self._closed = False

    @property
    def running(self) -> bool:
        """Whether a reload goes on, or waits for its turn."""
        return bool(self._tasks)

    def start(self) -> "asyncio.Task[Reload]":
        """Begin a reload, now or after the current one."""
        if self._next is None:
            self._next = asyncio.create_task(self._reload())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
            if self._closed:
                self._next.cancel()
        return self._next

    async def run(self) -> Reload:
        """Reload, and wait for the end.

        Raises:
            ReloadError: if the new bundle cannot be used.
            UnavailableError: if the server stops meanwhile.
        """
        task = self.start()
        await asyncio.wait({task})
        if task.cancelled():
            raise UnavailableError("The server is stopping.", "Ask another one.")
        reload = task.result()
        if reload.problem is not None:
            raise ReloadError(reload.problem, "Correct the bundle, and load it again.")
        return reload

    async def wait(self) -> None:
        """Wait for the end of all reloads that have been asked for."""
        if self._tasks:
            await asyncio.wait({*self._tasks})

    def close(self) -> None:
        """Cancel all reloads; a thread that loads a bundle cannot be stopped."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    async def _reload(self) -> Reload:
        async with self._loader.turn:
            self._next, path = None, self.path
            logger.info("reloading %s", path)
            start = time.monotonic()
            problem, digest = None, None
            try:
                active = await self._loader.load(path, self._settings)
                digest = active.bundle.digest
                await self._activate(active)
            except AftexportError as error:
                problem = str(error)
            except Exception as error:
                logger.exception("the reload has failed")
                problem = f"The reload has failed: {error!r}. See the server's log."
            seconds = time.monotonic() - start
            shown = problem
            for place in (path, path.absolute()):
                if shown and place.parent.name:  # only the log shows the path on this machine
                    shown = shown.replace(f"{place.parent}/", "")
            self.last = Reload(at=datetime.now(UTC), bundle=digest, seconds=seconds, problem=shown)
            self._metrics().reloads.labels("refused" if problem else "served").inc()
            if problem is None:
                logger.info("serving bundle %s after %.1f s", digest, seconds)
            else:
                logger.error("the bundle is refused, and nothing changes: %s", problem)
            return self.last


def _load(path: Path, settings: Settings) -> ActiveBundle:
    bundle = Bundle.open(path)
    model = load_model(bundle, settings, Console(quiet=True))
    if model.breach is not None:
        raise ParityError(f"{bundle.path}: {model.breach}.", model.remedy)
    check_unchanged(bundle)
    return ActiveBundle(bundle, model)
