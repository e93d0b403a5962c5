"""The parts of the server that all its models share."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aftserve.http.clients import LoopTurns
from aftserve.model.feature_tokens import FeatureSpace
from aftserve.model.inputs import TokenizerPool
from aftserve.model.reload import BundleLoader
from aftserve.observability.health import Health
from aftserve.observability.metrics import Metrics
from aftserve.observability.tracing import Traces
from aftserve.scheduling.admission import Admission
from aftserve.scheduling.scheduler import Scheduler
from aftserve.scheduling.watchdog import watched_loop
from aftserve.settings import Settings

logger = logging.getLogger(__name__)


class SharedResources:
    """The settings, the queue, the engine's thread and the observability of all models."""

    def __init__(self, settings: Settings, traces: Traces | None = None) -> None:
        self.settings = settings
        self.traces = traces or Traces()
        self.health = Health()
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            budget_tokens=settings.budget_tokens,
            stall_seconds=settings.stall_seconds,
            idle_seconds=settings.idle_seconds,
        )
        self.admission = Admission(self.scheduler, settings.max_queue_seconds)
        self.turns = LoopTurns()  # of requests on the event loop
        self.tokenizers = TokenizerPool(self.turns)
        self.feature_space = FeatureSpace(settings.spill, settings.max_arrays_bytes)
        self.loader = BundleLoader()  # the turns in which bundles are loaded
        self.metrics.waiting_documents.set_function(lambda: self.scheduler.waiting_documents)
        self.metrics.running_documents.set_function(lambda: self.scheduler.running_documents)
        self.metrics.idle.set_function(lambda: self.scheduler.idle)
        self.metrics.backlog_seconds.set_function(lambda: self.scheduler.backlog_seconds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the scheduler within the block, and watch the event loop."""
        scheduling = asyncio.create_task(self.scheduler.serve())
        scheduling.add_done_callback(self._end_with_scheduler)
        # When the scheduler ends, it gives every waiting client an error.
        self.health.when_failed(scheduling.cancel)
        self.health.phase = "ready"
        async with watched_loop(self.settings.stall_seconds):
            yield
        scheduling.cancel()

    def _end_with_scheduler(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            logger.critical("the scheduler has ended", exc_info=task.exception())
            self.health.fail()
