"""Takes a bundle anew while the one before answers, and goes on with that if it cannot be used."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import anyio.to_thread
from rich.console import Console

from aftexport.bundle import Bundle
from aftexport.errors import AftexportError, ParityError
from aftserve.errors import RefusedError, UnavailableError
from aftserve.model.active import Served
from aftserve.model.load import check_unchanged, load_model
from aftserve.observability.metrics import Metrics
from aftserve.schemas import Reload
from aftserve.settings import Settings

logger = logging.getLogger("aftserve.reloading")


class ReloadError(RefusedError):
    """The bundle cannot be used; the one before answers on."""

    status = 409


class Reloading:
    """One reload after the other.

    Whoever asks during one gets the next, with all others who do: the files may have changed
    since the one under way read them.

    Args:
        settings: of the server, with the bundle's path.
        serve: goes on with what was loaded.
        metrics: what it counts.

    Attributes:
        last: how the last one ended; None before.
        loading: whether a thread is at it.
    """

    def __init__(
        self, settings: Settings, serve: Callable[[Served], Awaitable[None]], metrics: Metrics
    ) -> None:
        self.last: Reload | None = None
        self.loading = False
        self._settings = settings
        self._serve = serve
        self._metrics = metrics
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Reload]] = set()
        self._next: asyncio.Task[Reload] | None = None
        self._closed = False

    def start(self) -> "asyncio.Task[Reload]":
        """Begins a reload, or has one follow that under way."""
        if self._next is None:
            self._next = asyncio.create_task(self._reload())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
            if self._closed:
                self._next.cancel()
        return self._next

    async def run(self) -> Reload:
        """Reloads, and waits for the end of it.

        Raises:
            ReloadError: where the bundle cannot be used.
            UnavailableError: where the server stops meanwhile.
        """
        task = self.start()
        await asyncio.wait({task})
        if task.cancelled():
            raise UnavailableError("The server is stopping.", "Ask another one.")
        reload = task.result()
        if reload.problem is not None:
            raise ReloadError(reload.problem, "The bundle before answers on.")
        return reload

    def close(self) -> None:
        """Gives up what is under way; a thread that is at it cannot be stopped."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    async def _reload(self) -> Reload:
        async with self._turn:
            self._next = None
            logger.info("reloading %s", self._settings.bundle)
            start = time.monotonic()
            problem, digest = None, None
            try:
                served = await self._load()
                digest = served.bundle.digest
                await self._serve(served)
            except AftexportError as error:
                problem = str(error)
            except Exception as error:
                logger.exception("the reload has failed")
                problem = f"The reload has failed: {error!r}. The server's log says more."
            seconds = time.monotonic() - start
            said = problem
            for path in (self._settings.bundle, self._settings.bundle.absolute()):
                if said and path.parent.name:  # where it is on this machine is for the log alone
                    said = said.replace(f"{path.parent}/", "")
            self.last = Reload(at=datetime.now(UTC), bundle=digest, seconds=seconds, problem=said)
            self._metrics.reloads.labels("refused" if problem else "served").inc()
            if problem is None:
                logger.info("serving bundle %s after %.1f s", digest, seconds)
            else:
                logger.error("the bundle before answers on: %s", problem)
            return self.last

    async def _load(self) -> Served:
        """What is at the path now, loaded beside what is served."""

        def load() -> Served:
            try:
                return _load(self._settings)
            finally:
                self.loading = False

        self.loading = True
        return await anyio.to_thread.run_sync(load, abandon_on_cancel=True)


def _load(settings: Settings) -> Served:
    bundle = Bundle.open(settings.bundle)
    model = load_model(bundle, settings, Console(quiet=True))
    if model.breach is not None:
        raise ParityError(f"{bundle.path}: {model.breach}.", "Export the model again.")
    check_unchanged(bundle)
    return Served(bundle, model)
