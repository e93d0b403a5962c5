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
        skipped: the check could not run here, and the command did not leave it out.
    """

    what: str
    said: str
    passed: bool = True
    printed: str = ""
    skipped: bool = False

    @classmethod
    def skip(cls, what: str, reason: str, option: str) -> "Outcome":
        """Return the outcome of a check that cannot run here.

        Args:
            what: the check.
            reason: the missing package or program.
            option: the option of ``make gpu-check`` that leaves it out.
        """
        said = f"{reason}; {option} leaves it out"
        return cls(what, said, skipped=True)

    def __str__(self) -> str:
        state = "SKIPPED, " if self.skipped else "" if self.passed else "FAILED, "
        return f"{self.what}: {state}{self.said}"
