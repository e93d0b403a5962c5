"""Whether the server takes requests, and the reason if it does not."""

from collections.abc import Callable


class Health:
    """The phase of the server, and the breach of parity if there is one.

    Attributes:
        phase: starting, ready, draining or failed.
        breach: reason why the answers cannot be trusted; None if there is none.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self.breach: str | None = None
        self._on_failure: list[Callable[[], object]] = []

    @property
    def ready(self) -> bool:
        """Whether the server takes requests."""
        return self.phase == "ready" and self.breach is None

    @property
    def answers(self) -> bool:
        """Whether the server answers requests, even while it is not ready."""
        return self.phase in ("ready", "draining") and self.breach is None

    @property
    def status(self) -> str:
        """The phase, with the breach if there is one."""
        if self.phase == "ready" and self.breach is not None:
            return f"not ready: {self.breach}"
        return self.phase

    def fail(self) -> None:
        """Mark the server as failed, which ends it."""
        self.phase = "failed"
        for action in self._on_failure:
            action()

    def when_failed(self, action: Callable[[], object]) -> None:
        """Call ``action`` at a failure."""
        self._on_failure.append(action)
