"""What goes over the wire."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

TokenIds = Annotated[list[StrictInt], Field(description="Token ids of one document.")]


class InferRequest(BaseModel):
    """Documents to classify: exactly one of the three forms."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(None, description="One document; the answer is one object.")
    texts: list[str] | None = Field(None, description="Documents.", min_length=1)
    input_ids: list[TokenIds] | None = Field(
        None, description="Tokenized documents, each of its own length.", min_length=1
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [self.text, self.texts, self.input_ids]
        if sum(form is not None for form in given) != 1:
            raise ValueError("give exactly one of text, texts and input_ids")
        return self


class Timings(BaseModel):
    """Where the time went, in seconds."""

    tokenize_seconds: float
    queue_seconds: float = Field(description="Waiting for documents that came before.")
    inference_seconds: float


class DocumentResult(BaseModel):
    """The answer for one document."""

    label: str
    scores: dict[str, float] = Field(description="Probability of every class.")
    tokens_total: int = Field(description="Tokens of the document.")
    tokens_used: int = Field(description="Tokens the model saw.")
    truncated: bool = Field(description="Whether the model saw less than the document.")
    timings: Timings


class InferResponse(BaseModel):
    """The answers for several documents, in the order they were sent."""

    results: list[DocumentResult]


class Problem(BaseModel):
    """What is wrong with a request, and what to do."""

    detail: str


class Status(BaseModel):
    """Liveness or readiness."""

    status: str
