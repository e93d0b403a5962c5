"""The order in which clients see a setting of the server that is replaced while it serves."""

from dataclasses import dataclass


@dataclass
class Generations:
    """The generations of a file of the server, numbered from 0.

    Attributes:
        written: the newest generation that the server may have read.
        seen: the newest generation that an answer has shown. Requests sent later have this one, or
            a newer one.
    """

    written: int = 0
    seen: int = 0

    @property
    def is_changing(self) -> bool:
        """Whether the newest generation has not been seen in use."""
        return self.seen < self.written

    def show(self, generation: int) -> None:
        """Note the generation of an answer."""
        self.seen = max(self.seen, generation)

    def since(self, seen: int) -> range:
        """Return the generations that may have answered a request sent when ``seen`` was seen."""
        return range(seen, self.written + 1)
