"""Whether the server wants requests, and why not."""

from collections.abc import Callable


class Health:
    """The phases of the server's life, and what speaks against it meanwhile.

    Attributes:
        phase: starting, ready, draining or failed.
        breach: why answers are not to be trusted, None where nothing is known.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self.breach: str | None = None
        self._on_failure: list[Callable[[], object]] = []

    @property
    def ready(self) -> bool:
        """Whether requests are wanted."""
        return self.phase == "ready" and self.breach is None

    @property
    def answers(self) -> bool:
        """Whether a request that comes all the same is answered."""
        return self.phase in ("ready", "draining") and self.breach is None

    @property
    def status(self) -> str:
        """The phase, with what speaks against it."""
        if self.phase == "ready" and self.breach is not None:
            return f"not ready: {self.breach}"
        return self.phase

    def fail(self) -> None:
        """The server cannot go on, and ends."""
        self.phase = "failed"
        for action in self._on_failure:
            action()

    def when_failed(self, action: Callable[[], object]) -> None:
        """Has ``action`` called at a failure."""
        self._on_failure.append(action)
