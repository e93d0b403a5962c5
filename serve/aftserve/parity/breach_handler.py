"""The reaction to a breach of parity: refuse requests, or run standard operators only."""

import asyncio
import logging
from functools import partial

from aftserve.model.load import ActiveBundle, load_standard_ops_model
from aftserve.model.reload import BundleLoader
from aftserve.observability.health import ModelHealth
from aftserve.scheduling.scheduler import Scheduler
from aftserve.settings import Settings

logger = logging.getLogger("aftserve.parity")


class BreachHandler:
    """The reaction to breaches of the active bundle, by the setting ``on_breach``."""

    def __init__(
        self, settings: Settings, health: ModelHealth, scheduler: Scheduler, loader: BundleLoader
    ) -> None:
        self._settings = settings
        self._health = health
        self._scheduler = scheduler
        self._loader = loader
        self._fallback: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    def handle(self, active: ActiveBundle, reason: str) -> None:
        """Refuse requests, or begin a fallback; later breaches during a fallback are ignored."""
        if self._settings.on_breach == "unready" or active.model.uses_standard_ops_only:
            self._health.breach = reason
        elif self._fallback is None:
            self._fallback = asyncio.create_task(self._fall_back(active, reason))
            self._running.add(self._fallback)
            self._fallback.add_done_callback(self._running.discard)

    async def wait(self) -> None:
        """Wait for the end of all fallbacks."""
        if self._running:
            await asyncio.wait({*self._running})

    def clear(self) -> None:
        """Forget the breaches of the bundle before: another one is active.

        A fallback of the bundle before goes on, because accepted requests wait for it.
        """
        self._fallback = None
        self._health.breach = None

    async def _fall_back(self, active: ActiveBundle, reason: str) -> None:
        """Continue with standard operators only, if their golden cases are within the bound."""
        with self._scheduler.paused(active):
            model = None
            try:
                async with self._loader.turn:
                    model = await self._loader.run(
                        partial(load_standard_ops_model, active.bundle, self._settings)
                    )
            except Exception:
                logger.exception("the model cannot be loaded with portable bodies only")
            is_active = self._fallback is asyncio.current_task()  # not of a bundle before
            if model is None or model.breach is not None:
                if is_active:
                    self._health.breach = reason
                return
            self._scheduler.forget(active.model)
            active.model = model
            if is_active:
                self._scheduler.measure(model)
                logger.warning("serving with portable bodies only from now on")
