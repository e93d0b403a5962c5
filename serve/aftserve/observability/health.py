"""Whether the server and its models take requests, and the reason if they do not."""

from collections.abc import Callable


class Health:
    """The phase of the process."""

    def __init__(self) -> None:
        self.phase = "starting"  # then ready, draining or failed
        self._on_failure: list[Callable[[], object]] = []

    @property
    def answers(self) -> bool:
        """Whether the server answers requests, even while it is not ready."""
        return self.phase in ("ready", "draining")

    def fail(self) -> None:
        """Mark the server as failed, which ends it."""
        self.phase = "failed"
        for action in self._on_failure:
            action()

    def when_failed(self, action: Callable[[], object]) -> None:
        """Call ``action`` at a failure."""
        self._on_failure.append(action)


class ModelHealth:
    """The health of one model: the phase of the process, and a breach of parity if there is one."""

    def __init__(self, process: Health) -> None:
        self._process = process
        self.breach: str | None = None  # reason why the answers cannot be trusted

    @property
    def ready(self) -> bool:
        """Whether the model takes requests."""
        return self._process.phase == "ready" and self.breach is None

    @property
    def answers(self) -> bool:
        """Whether the model answers requests, even while the server is not ready."""
        return self._process.answers and self.breach is None

    @property
    def status(self) -> str:
        """The phase, with the breach if there is one."""
        if self._process.phase == "ready" and self.breach is not None:
            return f"not ready: {self.breach}"
        return self._process.phase
