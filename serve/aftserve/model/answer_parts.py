"""JSON objects of the lines of a streamed answer."""

from typing import Literal

from pydantic import BaseModel, Field

from aftexport.heads import Span


class TokensPart(BaseModel):
    """A line of a streamed answer: the answers of a head for some tokens."""

    head: str = Field(description="Name of the head.")
    start_token: int = Field(description="Index of the first of these tokens in the document.")
    labels: tuple[str, ...] | None = Field(default=None, description="Label of each token.")
    scores: tuple[float, ...] | None = Field(
        default=None, description="Probability of each of these labels."
    )
    vectors: tuple[tuple[float, ...], ...] | None = Field(
        default=None, description="Vector of each token, or its values in a regression."
    )


class SpansPart(BaseModel):
    """A line of a streamed answer: the spans of a head that start in the line before."""

    head: str
    spans: tuple[Span, ...]


class StreamEnd(BaseModel):
    """The last line of a streamed answer; without it, the answer is not complete."""

    complete: Literal[True] = True
    lines: int = Field(description="Number of the lines before.")
