"""The answers of the server, and its errors."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from email.utils import parsedate_to_datetime
from typing import Any, Self


class ServerError(Exception):
    """The server gave no answer.

    Attributes:
        detail: the problem and its remedy.
        status: status of the HTTP response; None without a response.
        retry_after: seconds after which a retry may succeed; None if it never will.
    """

    def __init__(
        self, detail: str, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{status}: {detail}" if status else detail)
        self.detail = detail
        self.status = status
        self.retry_after = retry_after


class InvalidRequestError(ServerError):
    """The request is malformed, or the document cannot be classified."""


class TooLongError(InvalidRequestError):
    """A document or the request is over a limit, or takes longer than the deadline by itself."""


class NotAllowedError(ServerError):
    """The API key is missing, wrong, or not allowed to do this."""


class BusyError(ServerError):
    """The queue or the API key's rate was at its limit, also at the last retry."""


class UnavailableError(ServerError):
    """The server cannot be reached, is not ready, or is stopping."""


class DeadlineError(ServerError):
    """The deadline passed."""


_KINDS = {
    401: NotAllowedError,
    403: NotAllowedError,
    413: TooLongError,
    429: BusyError,
    503: UnavailableError,
    504: DeadlineError,
}


def error_of(status: int, detail: str, retry_after: str | None = None) -> ServerError:
    """Return the error of a response, by its status and its Retry-After header."""
    kind = _KINDS.get(status, InvalidRequestError if 400 <= status < 500 else ServerError)
    return kind(detail, status, parse_retry_after(retry_after))


def parse_retry_after(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which may be a date; None if malformed."""
    if retry_after is None:
        return None
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class Timings:
    """Times of the stages of an answer, in seconds; see the server's ``/openapi.json``."""

    tokenize_seconds: float
    queue_seconds: float
    inference_seconds: float
    predicted_seconds: float


@dataclass(frozen=True)
class Span:
    """A passage that contributes more to the logit than as many average tokens.

    Attributes:
        start_token, end_token: its first token, and the one after its last.
        contribution: contribution of its tokens to the logit.
        above_average: contribution minus the contribution of as many average tokens.
        start, end: its first character and the one after its last, if the document was a text.
        text: the passage, if the document was a text.
        text_pair: whether these are of the second text of a pair; None for one text, and for a
            passage from the one into the other.
        logit_without: logit of the document without the passage, if it was checked.
        drop: the logit minus ``logit_without``.
        until_token: the token after the last that ``contribution`` counts, of a causal model.
    """

    start_token: int
    end_token: int
    contribution: float
    above_average: float
    start: int | None = None
    end: int | None = None
    text: str | None = None
    text_pair: bool | None = None
    logit_without: float | None = None
    drop: float | None = None
    until_token: int | None = None


@dataclass(frozen=True)
class Evidence:
    """The evidence for a logit.

    Attributes:
        logit: the sum of all contributions and the offset.
        offset: part that does not depend on the tokens.
        spans: passages by their contribution above average.
        spread: whether no passage stands out; see the server's ``/openapi.json``.
        name: label or value of the logit; None if it is that of the answer's label, and was not
            chosen.
        head: output of the logit, if it was chosen.
    """

    logit: float
    offset: float
    spans: Sequence[Span]
    spread: bool = False
    name: str | None = None
    head: str | None = None

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Read the evidence from a response's JSON."""
        spans = [Span(**_known(Span, span)) for span in content["spans"]]
        return cls(**_known(cls, content) | {"spans": spans})


@dataclass(frozen=True)
class LabelSpan:
    """A run of tokens with one label.

    Attributes:
        label: the label, without the prefix of a scheme such as ``B-``.
        start_token, end_token: its first token, and the one after its last.
        score: probability of the label.
        start, end: its first character and the one after its last, if the document was a text.
        text: its characters, if the document was a text.
    """

    label: str
    start_token: int
    end_token: int
    score: float
    start: int | None = None
    end: int | None = None
    text: str | None = None

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Read a span from a response's JSON; unknown fields are ignored."""
        return cls(**_known(cls, content))


@dataclass(frozen=True)
class HeadAnswer:
    """The answer of one head; the head's task decides which fields it has.

    Attributes:
        label: the label, of a task whose labels exclude each other.
        labels: the labels that hold, of a multi-label classification; or the label of each token,
            of a token classification.
        scores: probability of every label, of a classification; or that of each token's label.
        calibrated: calibrated probability of every label, if the bundle has a calibration.
        abstain: whether the confidence is below the threshold of the calibration, if it has one.
        values: each value by its name, of a regression.
        spans: the spans of a token classification.
        vector: the vector of a feature extraction.
        vectors: the vector of each token, of a feature extraction for tokens; or the values of each
            token, of a regression for tokens.
    """

    label: str | None = None
    labels: Sequence[str] | None = None
    scores: Mapping[str, float] | Sequence[float] | None = None
    values: Mapping[str, float] | None = None
    calibrated: Mapping[str, float] | None = None
    abstain: bool | None = None
    spans: Sequence[LabelSpan] | None = None
    vector: Sequence[float] | None = None
    vectors: Sequence[Sequence[float]] | None = None

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Read the answer from a response's JSON; unknown fields are ignored."""
        return cls(**known_answer(cls, content))


@dataclass(frozen=True)
class Result:
    """The answer for one document.

    Attributes:
        label: the label, if the model's labels exclude each other; else None.
        scores: probability of every label; None without a label.
        calibrated: calibrated probability of every label, if the bundle has a calibration.
        abstain: whether the confidence is below the threshold of the calibration, if it has one.
        heads: the answer of each head by its name, of every other model.
        tokens_total: tokens of the document.
        tokens_used: tokens that the model saw.
        truncated: whether the model saw less than the document.
        policy: the policy for documents over the memory budget, or ``windows``.
        bundle: digest of the bundle that answered.
        timings: times of the stages.
        evidence: evidence for the largest logit, if it was requested without ``explain``.
        explained: evidence for each chosen label or value, if ``explain`` chose them.
        windows: the windows of the document, if the policy is ``windows``: their count, tokens,
            stride and aggregate, and those that decided.
    """

    tokens_total: int
    tokens_used: int
    truncated: bool
    policy: str
    bundle: str
    timings: Timings
    label: str | None = None
    scores: Mapping[str, float] | None = None
    heads: Mapping[str, HeadAnswer] | None = None
    evidence: Evidence | None = None
    explained: Sequence[Evidence] | None = None
    calibrated: Mapping[str, float] | None = None
    abstain: bool | None = None
    windows: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Read the answer from a response's JSON; unknown fields are ignored."""
        given = _known(cls, content)
        given["timings"] = Timings(**_known(Timings, content["timings"]))
        if "heads" in given:
            heads = given["heads"].items()
            given["heads"] = {name: HeadAnswer.read(head) for name, head in heads}
        if "evidence" in given:
            given["evidence"] = Evidence.read(given["evidence"])
        if "explained" in given:
            given["explained"] = [Evidence.read(one) for one in given["explained"]]
        return cls(**given)


def _known(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in content.items() if name in names}


def known_answer(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an answer that a type has, with its spans of labels."""
    given = _known(kind, content)
    if "spans" in given:
        given["spans"] = [LabelSpan.read(span) for span in given["spans"]]
    return given


@dataclass(frozen=True)
class Part:
    """The answers of one head for some tokens, or the spans that start there.

    Attributes:
        head: name of the head.
        start_token: index of the first of these tokens in the document; None for spans.
        labels: label of each token, of a token classification.
        scores: probability of each of these labels.
        vectors: vector of each token, of a feature extraction, or its values, of a regression.
        spans: spans that start at one of the tokens of the part before.
    """

    head: str
    start_token: int | None = None
    labels: Sequence[str] | None = None
    scores: Sequence[float] | None = None
    vectors: Sequence[Sequence[float]] | None = None
    spans: Sequence[LabelSpan] | None = None

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "Part":
        """Read a part from a line's JSON; unknown fields are ignored."""
        return cls(**known_answer(cls, content))


class StreamedAnswer:
    """The answer for one document, whose parts arrive as they are read.

    Args:
        content: the body of the response, in pieces of any size.

    Raises:
        ServerError: if the first line is not a result.

    Attributes:
        result: the answer without the heads for tokens.
    """

    def __init__(self, content: Iterable[bytes]) -> None:
        self._lines = _lines(content)
        self.result = Result.read(_checked(next(self._lines, {"detail": "It is empty."})))

    def __iter__(self) -> Iterator[Part]:
        """Yield the answers of each head, in the order of the tokens.

        Raises:
            ServerError: if the answer ends before it is complete; its subclass names the reason.
        """
        for line in self._lines:
            if line.get("complete"):
                return
            yield Part.read(_checked(line))
        raise ServerError("The answer ended before it was complete.")


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    if "detail" in line:
        raise error_of(line.get("status", 500), line["detail"])
    return line


def _lines(content: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each line; only line feeds end a line, as texts may have other ends."""
    rest = b""
    for piece in content:
        *lines, rest = (rest + piece).split(b"\n")
        yield from map(json.loads, lines)
