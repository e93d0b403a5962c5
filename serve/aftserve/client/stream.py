"""The streamed answer for one document."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aftserve.client.errors import ServerError, error_of
from aftserve.client.results import LabelSpan, Result, known_answer


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
