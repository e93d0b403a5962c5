"""What the server answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class Timings:
    """Where the time went, in seconds; see the server's ``/openapi.json``."""

    tokenize_seconds: float
    queue_seconds: float
    inference_seconds: float
    predicted_seconds: float


@dataclass(frozen=True)
class Span:
    """A passage that adds more to the logit than as many tokens do on average.

    Attributes:
        start_token, end_token: its first token, and the one after its last.
        contribution: what its tokens add to the logit.
        above_average: of that, what as many tokens do not add on average.
        start, end: its first character and the one after its last, of a text.
        text: the passage, of a text.
    """

    start_token: int
    end_token: int
    contribution: float
    above_average: float
    start: int | None = None
    end: int | None = None
    text: str | None = None


@dataclass(frozen=True)
class Evidence:
    """What speaks for the label.

    Attributes:
        logit: of the label: what all tokens add, and the offset.
        offset: what comes of no token.
        spans: those that add the most above average, first.
    """

    logit: float
    offset: float
    spans: Sequence[Span]

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Of a response's JSON."""
        spans = [Span(**_known(Span, span)) for span in content["spans"]]
        return cls(content["logit"], content["offset"], spans)


@dataclass(frozen=True)
class Result:
    """The answer for one document.

    Attributes:
        label: the class with the largest score.
        scores: probability of every class, by label.
        tokens_total: of the document.
        tokens_used: that the model saw.
        truncated: whether those are fewer.
        policy: for documents over the server's memory budget.
        bundle: digest of the bundle that gave it.
        timings: of it.
        evidence: what speaks for the label, where it was asked for.
    """

    label: str
    scores: Mapping[str, float]
    tokens_total: int
    tokens_used: int
    truncated: bool
    policy: str
    bundle: str
    timings: Timings
    evidence: Evidence | None = None

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Of a response's JSON; fields that are not known are left out."""
        given = _known(cls, content)
        given["timings"] = Timings(**_known(Timings, content["timings"]))
        if "evidence" in given:
            given["evidence"] = Evidence.read(given["evidence"])
        return cls(**given)


def _known(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in content.items() if name in names}
