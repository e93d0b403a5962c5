"""What was checked, and what came out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One check.

    Attributes:
        what: was checked.
        said: what came out, or why it was skipped.
        passed: false where something is wrong.
        printed: all that a program printed which failed.
    """

    what: str
    said: str
    passed: bool = True
    printed: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {'' if self.passed else 'FAILED, '}{self.said}"
